// What all kernels on the CPU share: number types, the exponential, sums, how a loop is compiled for several CPUs.
//
// Each kernel is a template over its number type that is always inlined, and one plain function for each type
// (FOR_EVERY_TYPE) that is compiled for AVX-512, AVX2 and plain x86-64, or whatever the machine is; the best is picked
// when the library is loaded. The compiler makes vectors of the loops: no branches in them, and sums in lanes.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_CPU
#endif
#if defined(__GNUC__) && !defined(__clang__)
#define EXACT __attribute__((optimize("fp-contract=off")))  // no multiply-add but those that are written
#else
#define EXACT
#endif
#define INLINE inline __attribute__((always_inline))
#define FOR_EVERY_TYPE(KERNEL) KERNEL(float) KERNEL(BFloat16) KERNEL(Half)

namespace {

constexpr int64_t kGrain = 1 << 15;  // elements that are worth a thread
constexpr int kLanes = 64;           // independent accumulators of a sum in fp32: four vectors of AVX-512

// 16-bit floats as their bits. Rounding is to nearest, ties to even, as torch rounds; a NaN stays one.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

INLINE float wide(float x) { return x; }
INLINE float wide(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
// With integers, because the compiler makes no vectors of its own conversion: exponent and mantissa are put where fp32
// has them, and multiplying by 2^112 makes up for the other bias, also for subnormal numbers.
INLINE float wide(Half x) {
  const uint32_t bits = x.bits;
  const uint32_t magnitude = (bits & 0x7FFF) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t finite = std::bit_cast<uint32_t>(scaled);
  const uint32_t value = magnitude >= 0x0F800000 ? magnitude | 0x7F800000 : finite;
  return std::bit_cast<float>(value | (bits & 0x8000) << 16);
}

template <typename T>
INLINE T narrow(float x);
template <>
INLINE float narrow<float>(float x) {
  return x;
}
template <>
INLINE BFloat16 narrow<BFloat16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded)};
}
// Normal numbers are rounded as bfloat16's are; below, adding 1/2 puts the last place of a subnormal where fp32 rounds.
template <>
INLINE Half narrow<Half>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000;
  uint32_t value = magnitude < 0x38800000 ? small : normal;
  value = magnitude >= 0x477FF000 ? 0x7C00 : value;
  value = magnitude > 0x7F800000 ? 0x7E00 : value;
  return {static_cast<uint16_t>(value | (bits >> 16 & 0x8000))};
}

template <typename T>
constexpr float kLowest = 0;
template <>
constexpr float kLowest<float> = std::numeric_limits<float>::lowest();
template <>
constexpr float kLowest<BFloat16> = -0x1.FEp127f;
template <>
constexpr float kLowest<Half> = -65504.0f;

// e^x to about 1 ulp for -87 <= x <= 88, anything elsewhere: 2^n p(r) with x = n ln 2 + r, |r| <= ln(2) / 2. The
// degree-6 polynomial is the Taylor series with its last coefficients fitted to the interval; ln 2 is split in two so
// that r is exact. Adding 1.5 x 2^23 rounds to an integer and leaves it in the lowest bits.
INLINE float exponential(float x) {
  const float shifted = x * 1.44269504088896341f + 0x1.8p23f;
  const float n = shifted - 0x1.8p23f;
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + 0x3F800000);
}

// e^x for x <= 0 or NaN (up to 88 does no harm), 0 where it would not be a normal number. Everything is built of this
// one, of -|x| where it must be: a bound on x beforehand would make the compiler fold constants into blends.
INLINE float exponential_or_zero(float x) {
  const float e = exponential(x);
  return x < -87.0f ? 0.0f : e;
}

// The sum of a power of two of lanes, in halves; of known sizes, so that they stay in registers.
template <int kCount>
INLINE float sum_lanes(float* lanes) {
  if constexpr (kCount == 1) return lanes[0];
  for (int lane = 0; lane < kCount / 2; ++lane) lanes[lane] += lanes[lane + kCount / 2];
  return sum_lanes<std::max(1, kCount / 2)>(lanes);
}

// The sum of term(i) for i < n, in kLanes sums whose order depends on n alone.
template <typename F>
INLINE float sum_of(int64_t n, F term) {
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += term(i + lane);
  for (int lane = 0; i + lane < n; ++lane) sums[lane] += term(i + lane);
  return sum_lanes<kLanes>(sums);
}

// Two sums at once, of what one pass over the same memory finds: `terms` adds to its last two arguments.
template <typename F>
INLINE std::pair<float, float> two_sums_of(int64_t n, F terms) {
  float first[kLanes] = {}, second[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) terms(i + lane, first[lane], second[lane]);
  for (int lane = 0; i + lane < n; ++lane) terms(i + lane, first[lane], second[lane]);
  return {sum_lanes<kLanes>(first), sum_lanes<kLanes>(second)};
}

// The largest of term(i) for i < n, at least `lowest`. A NaN is passed over.
template <typename F>
INLINE float largest_of(int64_t n, float lowest, F term) {
  float most[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) most[lane] = lowest;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float v = term(i + lane);
      most[lane] = v > most[lane] ? v : most[lane];
    }
  for (int lane = 0; i + lane < n; ++lane) {
    const float v = term(i + lane);
    most[lane] = v > most[lane] ? v : most[lane];
  }
  for (int half = kLanes / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) most[lane] = most[lane + half] > most[lane] ? most[lane + half] : most[lane];
  return most[0];
}

}  // namespace
