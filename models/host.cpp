// Decoding kernels for a CPU, fp32: what models/fused.py is for a GPU. All arrays are contiguous.
//
// Weights are read once, at the speed of memory, whether one token is decoded or eight are verified; and each sum runs
// in the same order however many rows there are, so that a token's values do not depend on what is beside it.
// B rows, T new tokens, R = B * T, N heads, K key-value heads, D head size, U uncommitted tokens.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef float lanes __attribute__((vector_size(64)));  // 16 floats: one register, or a few, of any machine
typedef int32_t integers __attribute__((vector_size(64)));
constexpr int LANES = 16;
constexpr int OUT = 8;   // rows of W that a thread reads together
constexpr int MOST = 6;  // rows of x at once, by 4 rows of W: sums and operands just fit 32 registers

static inline lanes load(const float *from) {
    lanes value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

static inline void store(float *to, lanes value) { std::memcpy(to, &value, sizeof value); }

static inline float total(lanes value) {
    typedef float half __attribute__((vector_size(32)));
    typedef float quarter __attribute__((vector_size(16)));
    half a, b;
    std::memcpy(&a, &value, 32), std::memcpy(&b, reinterpret_cast<char *>(&value) + 32, 32);
    a += b;
    quarter c, d;
    std::memcpy(&c, &a, 16), std::memcpy(&d, reinterpret_cast<char *>(&a) + 16, 16);
    c += d;
    return (c[0] + c[2]) + (c[1] + c[3]);
}

// exp of numbers not above 0, to 2 units in the last place; below -87 it is 0.
static inline lanes exponential(lanes x) {
    const lanes scaled = x * 1.44269504f - 0.5f;
    const integers n = __builtin_convertvector(scaled, integers);  // towards zero: the nearest, for x <= 0
    const lanes whole = __builtin_convertvector(n, lanes);
    const lanes r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const integers bits = (n + 127) << 23;
    lanes power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? lanes{} : p * power;
}

// R rows of x by P rows of W, all sums in registers; what lies `ahead` of these rows of W is fetched meanwhile.
template <int R, int P>
static void block(const float *x, const float *w, float *y, int64_t H, int64_t O, int64_t ahead) {
    lanes sums[P][R] = {};
    int64_t h = 0;
    for (; h + LANES <= H; h += LANES) {
        lanes weight[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            weight[p] = load(w + p * H + h);
            __builtin_prefetch(w + p * H + h + ahead, 0, 2);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const lanes value = load(x + r * H + h);
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) sums[p][r] += weight[p] * value;
        }
    }
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) {
            float sum = total(sums[p][r]);
            for (int64_t rest = h; rest < H; rest++) sum += w[p * H + rest] * x[r * H + rest];
            y[r * O + p] = sum;
        }
}

template <int R>
static void rows(const float *x, const float *w, float *y, int64_t H, int64_t O, int count) {
    constexpr int P = R > 2 ? 4 : 8;
    int p = 0;
    for (; p + P <= count; p += P) block<R, P>(x, w + p * H, y + p, H, O, OUT * H);
    for (; p < count; p++) block<R, 1>(x, w + p * H, y + p, H, O, 0);
}

static void all_rows(const float *x, const float *w, float *y, int64_t R, int64_t H, int64_t O, int count) {
    for (; R > 0; R -= MOST, x += MOST * H, y += MOST * O) switch (R) {
            case 1: rows<1>(x, w, y, H, O, count); break;
            case 2: rows<2>(x, w, y, H, O, count); break;
            case 3: rows<3>(x, w, y, H, O, count); break;
            case 4: rows<4>(x, w, y, H, O, count); break;
            case 5: rows<5>(x, w, y, H, O, count); break;
            default: rows<MOST>(x, w, y, H, O, count);
        }
}

static float dot(const float *a, const float *b, int64_t n) {
    lanes sum = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum += load(a + i) * load(b + i);
    float out = total(sum);
    for (; i < n; i++) out += a[i] * b[i];
    return out;
}

struct Shape {
    int64_t T, U, N, K, capacity, offset, depth, limit, line;
    float scale, eps;
};

// Norm (with a gain), then rotate D numbers in place of `to`.
static void turn(const float *from, const float *gain, const float *cos, const float *sin, float eps, int D, float *to) {
    float x[256];
    const float scale = gain ? 1 / std::sqrt(dot(from, from, D) / D + eps) : 1;
    for (int d = 0; d < D; d++) x[d] = gain ? from[d] * scale * gain[d] : from[d];
    for (int d = 0; d < D / 2; d++) {
        to[d] = x[d] * cos[d] - x[d + D / 2] * sin[d];
        to[d + D / 2] = x[d + D / 2] * cos[d + D / 2] + x[d] * sin[d + D / 2];
    }
}

// One head's attention of the tokens first .. first + R - 1 of one row over `span` keys.
template <int R, int D>
static void attend_tile(
    const float *queries, int64_t stride, const float *keys, const float *values, const uint8_t *seen, int64_t length,
    int64_t first, const Shape &s, float *score, float *out
) {
    const int64_t span = length + s.U, width = (span + LANES - 1) / LANES * LANES;
    for (int64_t slot = 0; slot < span; slot++) {
        lanes sums[R] = {};
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
            for (int d = 0; d < D; d += LANES)
                sums[r] += load(queries + r * stride + d) * load(keys + slot * D + d);
        const int64_t u = slot - length;
        for (int r = 0; r < R; r++) {
            const bool visible = u < 0 || (seen ? seen[(first + r) * s.U + u] != 0 : u <= first + r);
            score[r * width + slot] = visible ? total(sums[r]) * s.scale : -INFINITY;
        }
    }
    lanes mixed[R][D / LANES] = {};
    float mass[R];
    for (int r = 0; r < R; r++) {
        float *row = score + r * width, best = -INFINITY;
        for (int64_t slot = span; slot < width; slot++) row[slot] = -INFINITY;
        for (int64_t slot = 0; slot < span; slot++) best = row[slot] > best ? row[slot] : best;
        lanes sum = {};
        for (int64_t slot = 0; slot < width; slot += LANES) {
            const lanes p = exponential(load(row + slot) - best);
            store(row + slot, p);
            sum += p;
        }
        mass[r] = total(sum);
    }
    for (int64_t slot = 0; slot < span; slot++)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int d = 0; d < D / LANES; d++)
                mixed[r][d] += score[r * width + slot] * load(values + slot * D + d * LANES);
    for (int r = 0; r < R; r++)
        for (int d = 0; d < D / LANES; d++) store(out + r * stride + d * LANES, mixed[r][d] / mass[r]);
}

template <int D>
static void attend_all(
    const float *qkv, const float *cos, const float *sin, const int64_t *depths, const int64_t *lengths,
    const float *q_gain, const float *k_gain, float *keys, float *values, const uint8_t *seen, float *queries,
    float *out, int64_t B, const Shape &s, int threads
) {
    const int64_t T = s.T, N = s.N, K = s.K, heads = N + 2 * K;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t each = 0; each < B * T * heads; each++) {
            const int64_t row = each / heads, head = each % heads, b = row / T, t = row % T;
            const int64_t behind = depths ? depths[row] : s.line ? t : s.depth, p = lengths[b] + behind;
            const float *c = cos + (p < s.limit ? p : s.limit) * D, *n = sin + (p < s.limit ? p : s.limit) * D;
            const float *from = qkv + each * D;
            const int64_t wanted = lengths[b] + s.offset + t, slot = wanted < s.capacity ? wanted : s.capacity - 1;
            const int64_t at = ((b * K + (head < N ? 0 : (head - N) % K)) * s.capacity + slot) * D;
            if (head < N)
                turn(from, q_gain, c, n, s.eps, D, queries + (row * N + head) * D);
            else if (head < N + K)
                turn(from, k_gain, c, n, s.eps, D, keys + at);
            else
                std::memcpy(values + at, from, D * sizeof(float));
        }
        std::vector<float> score;
#pragma omp for schedule(dynamic)
        for (int64_t each = 0; each < B * N; each++) {
            const int64_t b = each / N, head = each % N, length = lengths[b];
            const int64_t pair = (b * K + head / (N / K)) * s.capacity * D;
            const uint8_t *mask = seen ? seen + b * T * s.U : nullptr;
            score.resize(4 * (length + s.U + LANES));
            for (int64_t t = 0; t < T;) {
                const int64_t at = ((b * T + t) * N + head) * D, left = T - t;
                const float *q = queries + at, *k = keys + pair, *v = values + pair;
                if (left >= 4)
                    attend_tile<4, D>(q, N * D, k, v, mask, length, t, s, score.data(), out + at), t += 4;
                else
                    attend_tile<1, D>(q, N * D, k, v, mask, length, t, s, score.data(), out + at), t += 1;
            }
        }
    }
}

extern "C" {

// y [R, O] = x [R, H] W[O, H]^T
void few_rows(const float *x, const float *w, float *y, int64_t R, int64_t H, int64_t O, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t o = 0; o < O; o += OUT) all_rows(x, w + o * H, y + o, R, H, O, O - o < OUT ? O - o : OUT);
}

// sum [R, H] = x + delta (x itself without one); out = its RMS norm times `gain`
void add_norm(
    const float *x, const float *delta, const float *gain, float *sum, float *out, int64_t R, int64_t H, float eps
) {
    for (int64_t r = 0; r < R; r++, x += H, out += H) {
        const float *row = x;
        if (delta) {
            for (int64_t h = 0; h < H; h++) sum[h] = x[h] + delta[h];
            row = sum, sum += H, delta += H;
        }
        const float scale = 1 / std::sqrt(dot(row, row, H) / H + eps);
        for (int64_t h = 0; h < H; h++) out[h] = row[h] * scale * gain[h];
    }
}

// out [R, I] = silu(gate) * up of gate_up [R, 2 I]
void gated(const float *gate_up, float *out, int64_t R, int64_t I) {
    for (int64_t r = 0; r < R; r++, gate_up += 2 * I, out += I) {
        int64_t i = 0;
        for (; i + LANES <= I; i += LANES) {
            const lanes gate = load(gate_up + i), low = gate < 0 ? gate : -gate, e = exponential(low);
            store(out + i, gate * (gate < 0 ? e : lanes{} + 1.0f) / (1.0f + e) * load(gate_up + I + i));
        }
        for (; i < I; i++) out[i] = gate_up[i] / (1 + std::exp(-gate_up[i])) * gate_up[I + i];
    }
}

// Norm, rotate and store the new keys and values, then attend: 0, or 1 for a head size that has no kernel.
int attention(
    const float *qkv, const float *cos, const float *sin, const int64_t *depths, const int64_t *lengths,
    const float *q_gain, const float *k_gain, float *keys, float *values, const uint8_t *seen, float *queries,
    float *out, int64_t B, int64_t D, const Shape *shape, int threads
) {
    switch (D) {
#define CASE(size)                                                                                                   \
    case size:                                                                                                       \
        attend_all<size>(                                                                                            \
            qkv, cos, sin, depths, lengths, q_gain, k_gain, keys, values, seen, queries, out, B, *shape, threads     \
        );                                                                                                           \
        return 0;
        CASE(16)
        CASE(32)
        CASE(64)
        CASE(128)
        CASE(256)
        default: return 1;
    }
}
}
