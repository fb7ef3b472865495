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
#define SELECTED(a, b) (doubles)(((longs)a & (a > b)) | ((longs)b & ~(a > b)))

#define AHEAD 1024 /* elements */
/* Reading must not drive out of the caches what training, and this package's Python, work with. */
#define NOT_TO_STAY(p) __builtin_prefetch(p, 0, 0)

#define EACH(k) _Pragma("GCC unroll 2") for (int k = 0; k < SIDE; k++)

#define PASS(NAME, TARGET, LANES, TYPE, OF, WIDENED, LARGER)                                     \
  TARGET static void NAME(const TYPE *c, const TYPE *r, int64_t n, double by, int same,          \
                          sums *out) {                                                           \
    enum { STEP = LANES * SIDE };                                                                \
    typedef double doubles __attribute__((vector_size(8 * LANES), aligned(8), may_alias));       \
    typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias, unused)); \
    typedef int64_t longs __attribute__((vector_size(8 * LANES), aligned(8), unused));           \
    typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(2), may_alias, unused)); \
    doubles cc[SIDE] = {0}, rr[SIDE] = {0}, cr[SIDE] = {0}, dd[SIDE] = {0}, most[SIDE] = {0};    \
    TYPE ends[2][STEP];                                                                          \
    for (int64_t i = 0; i < n; i += STEP) {                                                      \
      const TYPE *at_c = c + i, *at_r = r + i;                                                   \
      if (n - i < STEP) {                                                                        \
        memset(ends, 0, sizeof ends);                                                            \
        at_c = memcpy(ends[0], at_c, (n - i) * sizeof(TYPE));                                    \
        at_r = memcpy(ends[1], at_r, (n - i) * sizeof(TYPE));                                    \
      }                                                                                          \
      NOT_TO_STAY(at_r + AHEAD);                                                                 \
      NOT_TO_STAY(at_c + AHEAD);                                                                 \
      EACH(k) {                                                                                  \
        doubles y = WIDENED(OF(at_r, k));                                                        \
        rr[k] += y * y;                                                                          \
        if (same) continue;                                                                      \
        doubles x = WIDENED(OF(at_c, k)) * by;                                                   \
        doubles d = x - y;                                                                       \
        cc[k] += x * x;                                                                          \
        cr[k] += x * y;                                                                          \
        dd[k] += d * d;                                                                          \
        d = (doubles)((longs)d & INT64_MAX);                                                     \
        most[k] = LARGER(d, most[k]);                                                            \
      }                                                                                          \
    }                                                                                            \
    double norm = 0, other = 0, dot = 0, diff = 0;                                               \
    EACH(k) for (int i = 0; i < LANES; i++) {                                                    \
      norm += rr[k][i];                                                                          \
      other += cc[k][i];                                                                         \
      dot += cr[k][i];                                                                           \
      diff += dd[k][i];                                                                          \
      if (most[k][i] > out->of[4]) out->of[4] = most[k][i];                                      \
    }                                                                                            \
    out->of[0] += diff;                                                                          \
    out->of[1] += norm;                                                                          \
    out->of[2] += same ? norm : other;                                                           \
    out->of[3] += same ? norm : dot;                                                             \
  }

#define PASSES(SUFFIX, TARGET, LANES, WIDENED, LARGER)                                           \
  PASS(pass_float##SUFFIX, TARGET, LANES, float, OF_FLOAT, WIDENED, LARGER)                      \
  PASS(pass_double##SUFFIX, TARGET, LANES, double, OF_DOUBLE, AS_IT_IS, LARGER)                  \
  PASS(pass_bfloat16##SUFFIX, TARGET, LANES, uint16_t, OF_BFLOAT16, WIDENED, LARGER)

PASSES(, , 2, CONVERTED, SELECTED)
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define FOR(ARCH) __attribute__((target(ARCH)))
PASSES(_256, FOR("arch=x86-64-v3"), 4, _mm256_cvtps_pd, _mm256_max_pd)
PASSES(_512, FOR("arch=x86-64-v4"), 8, _mm512_cvtps_pd, _mm512_max_pd)
#define CAN(WIDTH, ARCH) (ttrace_widest >= WIDTH && __builtin_cpu_supports(ARCH))
#define CALL(NAME, ...)                                  \
  (CAN(512, "x86-64-v4")   ? NAME##_512(__VA_ARGS__)     \
   : CAN(256, "x86-64-v3") ? NAME##_256(__VA_ARGS__)     \
                           : NAME(__VA_ARGS__))
#else
#define CALL(NAME, ...) NAME(__VA_ARGS__)
#endif

static int row_sums(const char *c, const char *r, int64_t size, int64_t columns, double by,
                    sums *out) {
  int equal = 1;
  for (int64_t at = 0; at < columns; at += BLOCK) {
    int64_t n = columns - at < BLOCK ? columns - at : BLOCK;
    const void *here = c + at * size, *there = r + at * size;
    int same = !memcmp(here, there, n * size);
    equal &= same;
    same &= by == 1.0;
    if (size == 4) CALL(pass_float, here, there, n, by, same, out);
    else if (size == 8) CALL(pass_double, here, there, n, by, same, out);
    else CALL(pass_bfloat16, here, there, n, by, same, out);
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
