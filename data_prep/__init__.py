from recipes import tell_interrupted_start

tell_interrupted_start()
