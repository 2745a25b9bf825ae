// Quantisation to integers of 8 or 4 bits in blocks that share a scale, and back.
//
// The 4-bit codes of a block of n values (a multiple of 16) take n/2 bytes: byte i has the code of value i in its lower
// half and that of value n/2 + i in its upper half, each plus 8.

#pragma once

#include "common.h"

namespace {

constexpr int64_t kQuantBlock = 256;  // base/quantized.py
constexpr float kQuantLeast = 1e-35f;  // a block whose largest value is below becomes zeros: the inverse would overflow
constexpr float kQuantShift = 0x1.8p23f;  // adding it rounds a small number to an integer, in the lowest bits

// Returns the bits of a number without its sign, in its own width: a vector holds twice as many 16-bit integers. The
// integers are ordered like the magnitudes, with infinities above all numbers and NaNs above both.
INLINE uint32_t unsigned_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7FFFFFFF; }
INLINE uint16_t unsigned_bits(BFloat16 x) { return x.bits & 0x7FFF; }
INLINE uint16_t unsigned_bits(Half x) { return x.bits & 0x7FFF; }

// Returns the largest magnitude of a block.
template <typename T>
INLINE float largest(const T* __restrict x, int64_t n) {
  using Bits = decltype(unsigned_bits(T{}));
  Bits most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits bits = unsigned_bits(x[i]);
    most = bits > most ? bits : most;
  }
  return wide(std::bit_cast<T>(most));
}

INLINE uint32_t code_of(float x, float inverse) { return std::bit_cast<uint32_t>(x * inverse + kQuantShift); }

template <typename T>
INLINE void quantize_block_of(const T* __restrict x, int64_t n, int bits, uint8_t* __restrict codes, float* scale) {
  const float limit = static_cast<float>((1 << (bits - 1)) - 1);
  const float most = largest(x, n);
  const bool finite = most < std::numeric_limits<float>::infinity(), some = finite && most >= kQuantLeast;
  const float inverse = some ? limit / most : 0.0f;
  *scale = some ? most / limit : finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  if (bits == 8) {
    for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(code_of(wide(x[i]), inverse));
  } else {
    for (int64_t i = 0; i < n / 2; ++i) {
      const uint32_t low = code_of(wide(x[i]), inverse) + 8, high = code_of(wide(x[n / 2 + i]), inverse) + 8;
      codes[i] = static_cast<uint8_t>((low & 0xF) | (high & 0xF) << 4);
    }
  }
}

// Rounds x, which must not be a NaN with a nonzero lower half (see `rounded`).
template <typename T>
INLINE T narrow_plain(float x) {
  return narrow<T>(x);
}
template <>
INLINE BFloat16 narrow_plain<BFloat16>(float x) {
  return {static_cast<uint16_t>(rounded(x) >> 16)};
}

template <bool ADD, typename T>
INLINE void put(T* into, float value) {
  *into = narrow_plain<T>(ADD ? wide(*into) + value : value);
}

template <bool ADD, typename T>
INLINE void dequantize_block_of(const uint8_t* __restrict codes, float sent, int bits, T* __restrict into, int64_t n) {
  const float scale = plain(sent);
  if (bits == 8) {
    for (int64_t i = 0; i < n; ++i) put<ADD>(into + i, static_cast<float>(static_cast<int8_t>(codes[i])) * scale);
  } else {
    for (int64_t i = 0; i < n / 2; ++i) {
      const int low = codes[i] & 0xF, high = codes[i] >> 4;
      put<ADD>(into + i, static_cast<float>(low - 8) * scale);
      put<ADD>(into + n / 2 + i, static_cast<float>(high - 8) * scale);
    }
  }
}

#define QUANTIZE(T)                                                                                                   \
  EXACT FOR_EVERY_CPU void quantize_block(const T* x, int64_t n, int bits, uint8_t* codes, float* scale) {            \
    quantize_block_of(x, n, bits, codes, scale);                                                                      \
  }                                                                                                                   \
  EXACT FOR_EVERY_CPU void dequantize_block(const uint8_t* codes, float scale, int bits, T* into, int64_t n) {        \
    dequantize_block_of<false>(codes, scale, bits, into, n);                                                          \
  }                                                                                                                   \
  EXACT FOR_EVERY_CPU void add_dequantized_block(const uint8_t* codes, float scale, int bits, T* into, int64_t n) {   \
    dequantize_block_of<true>(codes, scale, bits, into, n);                                                           \
  }
FOR_EVERY_TYPE(QUANTIZE)
#undef QUANTIZE

}  // namespace
