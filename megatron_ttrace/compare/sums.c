/* SPDX-License-Identifier: Apache-2.0 */
/* The sums of compare/measure.py over two tensors, in one reading.
 *
 * Elements are widened to double, and summed in the lanes of the processor's vectors. Blocks that
 * are bitwise equal contribute to the norm alone.
 */

#include <stdint.h>
#include <string.h>

const uint32_t ttrace_source = TTRACE_SOURCE; /* the CRC-32 of this file */
int ttrace_widest = 512; /* bits of a vector; tests lower it to run what other processors run */

#define SIDE 2 /* vectors that are summed side by side: an addition waits for the one before it */
#define MOST 16 /* dimensions */
#define BLOCK 2048 /* elements: both sides of it stay in a core's first-level cache */

/* diff, reference, candidate, dot, worst */
typedef struct { double of[5]; } sums;

/* Vector k of those that begin at p. Of two bfloat16 neighbours the lower half of a word is in
 * vector 0 and the upper one in vector 1: in which lane an element is summed does not matter. */
#define OF_FLOAT(p, k) ((const floats *)(p))[k]
#define OF_DOUBLE(p, k) ((const doubles *)(p))[k]
#define OF_BFLOAT16(p, k) \
  ((k) ? (floats)(*(const words *)(p) & 0xffff0000u) : (floats)(*(const words *)(p) << 16))

#define CONVERTED(v) __builtin_convertvector(v, doubles)
#define AS_IT_IS(v) (v)
/* The larger of |a| and b, which is not negative. */
#define MAGNITUDE(a) (doubles)((longs)(a) & INT64_MAX)
#define LARGER(a, b) (doubles)(((longs)a & (a > b)) | ((longs)b & ~(a > b)))
#define LARGEST(a, b) LARGER(MAGNITUDE(a), b)

#define AHEAD 1024 /* elements */
/* Into the second-level cache: a hint that data is not to stay there halves the rate. */
#define AHEAD_OF(p) __builtin_prefetch((p) + AHEAD, 0, 2)

#define EACH(k) _Pragma("GCC unroll 2") for (int k = 0; k < SIDE; k++)

#define VECTORS(LANES)                                                                           \
  enum { STEP = LANES * SIDE };                                                                  \
  typedef double doubles __attribute__((vector_size(8 * LANES), aligned(8), may_alias));         \
  typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias, unused));   \
  typedef int64_t longs __attribute__((vector_size(8 * LANES), aligned(8), unused));             \
  typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(2), may_alias, unused))

/* The next STEP elements at p; the last ones are continued with zeros. */
#define NEXT(TYPE, p, end)                                                                       \
  if (n - i < STEP) p = memcpy(memset(end, 0, sizeof end), p, (n - i) * sizeof(TYPE));           \
  AHEAD_OF(p)

#define PASS(NAME, TARGET, LANES, TYPE, OF, WIDENED, LARGEST)                                    \
  TARGET static void NAME(const TYPE *c, const TYPE *r, int64_t n, double by, sums *out) {       \
    VECTORS(LANES);                                                                              \
    doubles cc[SIDE] = {0}, rr[SIDE] = {0}, dd[SIDE] = {0}, most[SIDE] = {0};                    \
    _Alignas(64) TYPE ends[2][STEP];                                                             \
    for (int64_t i = 0; i < n; i += STEP) {                                                      \
      const TYPE *at_c = c + i, *at_r = r + i;                                                   \
      NEXT(TYPE, at_c, ends[0]);                                                                 \
      NEXT(TYPE, at_r, ends[1]);                                                                 \
      EACH(k) {                                                                                  \
        doubles x = WIDENED(OF(at_c, k)) * by, y = WIDENED(OF(at_r, k)), d = x - y;              \
        cc[k] += x * x;                                                                          \
        rr[k] += y * y;                                                                          \
        dd[k] += d * d;                                                                          \
        most[k] = LARGEST(d, most[k]);                                                           \
      }                                                                                          \
    }                                                                                            \
    double candidate = 0, reference = 0, diff = 0;                                               \
    EACH(k) for (int i = 0; i < LANES; i++) {                                                    \
      candidate += cc[k][i];                                                                     \
      reference += rr[k][i];                                                                     \
      diff += dd[k][i];                                                                          \
      if (most[k][i] > out->of[4]) out->of[4] = most[k][i];                                      \
    }                                                                                            \
    out->of[0] += diff;                                                                          \
    out->of[1] += reference;                                                                     \
    out->of[2] += candidate;                                                                     \
    /* As exact as the norms are, and a multiplication less for each element. */                 \
    out->of[3] += (candidate + reference - diff) / 2;                                            \
  }                                                                                              \
                                                                                                 \
  TARGET static void NAME##_equal(const TYPE *r, int64_t n, sums *out) {                         \
    VECTORS(LANES);                                                                              \
    doubles rr[SIDE] = {0};                                                                      \
    _Alignas(64) TYPE end[STEP];                                                                 \
    for (int64_t i = 0; i < n; i += STEP) {                                                      \
      const TYPE *at_r = r + i;                                                                  \
      NEXT(TYPE, at_r, end);                                                                     \
      EACH(k) {                                                                                  \
        doubles y = WIDENED(OF(at_r, k));                                                        \
        rr[k] += y * y;                                                                          \
      }                                                                                          \
    }                                                                                            \
    double norm = 0;                                                                             \
    EACH(k) for (int i = 0; i < LANES; i++) norm += rr[k][i];                                    \
    for (int of = 1; of < 4; of++) out->of[of] += norm;                                          \
  }

#define PASSES(SUFFIX, TARGET, LANES, WIDENED, LARGEST)                                          \
  PASS(pass_float##SUFFIX, TARGET, LANES, float, OF_FLOAT, WIDENED, LARGEST)                     \
  PASS(pass_double##SUFFIX, TARGET, LANES, double, OF_DOUBLE, AS_IT_IS, LARGEST)                 \
  PASS(pass_bfloat16##SUFFIX, TARGET, LANES, uint16_t, OF_BFLOAT16, WIDENED, LARGEST)

PASSES(, , 2, CONVERTED, LARGEST)
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define FOR(ARCH) __attribute__((target(ARCH)))
#define LARGEST_256(a, b) _mm256_max_pd(MAGNITUDE(a), b)
#define LARGEST_512(a, b) _mm512_range_pd(a, b, 11) /* the larger magnitude, without its sign */
PASSES(_256, FOR("arch=x86-64-v3"), 4, _mm256_cvtps_pd, LARGEST_256)
PASSES(_512, FOR("arch=x86-64-v4"), 8, _mm512_cvtps_pd, LARGEST_512)
#define CAN(WIDTH, ARCH) (ttrace_widest >= WIDTH && __builtin_cpu_supports(ARCH))
#define CALL(NAME, MORE, ...)                                  \
  (CAN(512, "x86-64-v4")   ? NAME##_512##MORE(__VA_ARGS__)     \
   : CAN(256, "x86-64-v3") ? NAME##_256##MORE(__VA_ARGS__)     \
                           : NAME##MORE(__VA_ARGS__))
#else
#define CALL(NAME, MORE, ...) NAME##MORE(__VA_ARGS__)
#endif

/* A pass of the type whose elements have this size. */
#define FOR_SIZE(MORE, ...)                                     \
  (size == 4   ? CALL(pass_float, MORE, __VA_ARGS__)            \
   : size == 8 ? CALL(pass_double, MORE, __VA_ARGS__)           \
               : CALL(pass_bfloat16, MORE, __VA_ARGS__))

static int row_sums(const char *c, const char *r, int64_t size, int64_t columns, double by,
                    sums *out) {
  int equal = 1;
  for (int64_t at = 0; at < columns; at += BLOCK) {
    int64_t n = columns - at < BLOCK ? columns - at : BLOCK;
    const void *here = c + at * size, *there = r + at * size;
    int same = !memcmp(here, there, n * size);
    equal &= same;
    if (same && by == 1.0) FOR_SIZE(_equal, there, n, out);
    else FOR_SIZE(, here, there, n, by, out);
  }
  return equal;
}

/* Adds to `out`; returns whether all bits are equal.
 *
 * size: bytes of an element; 2 is bfloat16.
 * by: what the candidate's elements are multiplied by.
 * dims: size of each dimension, then the candidate's strides, then the reference's, in elements.
 *   Elements of the last dimension are neighbours. */
int ttrace_sums(const char *c, const char *r, int64_t size, double by, int64_t count,
                const int64_t *dims, sums *out) {
  if (count == 1) return row_sums(c, r, size, dims[0], by, out);
  int equal = 1;
  int64_t at[MOST] = {0};
  for (;;) {
    equal &= row_sums(c, r, size, dims[count - 1], by, out);
    int64_t dim = count - 2;
    for (; dim >= 0; dim--) {
      int64_t of_c = dims[count + dim] * size, of_r = dims[2 * count + dim] * size;
      c += of_c;
      r += of_r;
      if (++at[dim] < dims[dim]) break;
      c -= of_c * dims[dim];
      r -= of_r * dims[dim];
      at[dim] = 0;
    }
    if (dim < 0) return equal;
  }
}
