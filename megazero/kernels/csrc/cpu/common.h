// What all kernels on the CPU share: number types, the exponential, how a loop is compiled for several CPUs.
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

// A bfloat16 as the upper half of the result. A NaN stays one whose lower half is 0, because nothing is carried then:
// one that arithmetic makes, and one that it hands on from a widened number. Others may overflow.
INLINE uint32_t rounded(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return bits + 0x7FFF + (bits >> 16 & 1);
}
// x, or the NaN of arithmetic: what an argument in fp32 has to go through before it meets numbers to be `rounded`.
INLINE float plain(float x) { return x == x ? x : std::numeric_limits<float>::quiet_NaN(); }

template <typename T>
INLINE T narrow(float x);
template <>
INLINE float narrow<float>(float x) {
  return x;
}
template <>
INLINE BFloat16 narrow<BFloat16>(float x) {
  return {static_cast<uint16_t>(x != x ? 0x7FC0 : rounded(x) >> 16)};
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

// e^x for x <= 0 or NaN (up to 88 does no harm), 0 where it would not be a normal number; elsewhere to about 1 ulp and
// 2e-8 |x| (5e-8 on CPUs without multiply-adds). It is 2^n p(f) with x log2(e) = n + f, |f| <= 1/2: adding 1.5 x 2^23 rounds to the integer n and leaves it
// in the lowest bits, with 127 more in fp32's exponent. p is 1 at 0 and off by 9.2e-8 at most; taken by halves, because
// a long chain of operations waits more than it computes. Everything is built of this one, of -|x| where it must be: a
// bound on x beforehand would make the compiler fold constants into blends.
INLINE float exponential_or_zero(float x) {
  constexpr float kLog2E = 1.44269504088896341f, kShift = 0x1.8p23f + 127.0f;
  const float shifted = x * kLog2E + kShift;
  const float f = x * kLog2E - (shifted - kShift);
  const float f2 = f * f;
  float p = 1.326472731e-03f * f + 9.671512991e-03f;
  p = p * f2 + (5.550733581e-02f * f + 2.402224243e-01f);
  p = p * f2 + (6.931470037e-01f * f + 1.0f);
  p *= std::bit_cast<float>(std::bit_cast<uint32_t>(shifted) << 23);
  return x < -87.0f ? 0.0f : p;
}

}  // namespace
