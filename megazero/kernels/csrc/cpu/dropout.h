// Dropout whose mask is a hash of (key, sample, position, channel): recomputed where it is needed, never stored.
//
// The words equal those of megazero/kernels/counter.py: C. Wellons' two-multiply mixer (2018), in exact integers.

#pragma once

#include "passes.h"

namespace {

constexpr uint32_t kGolden = 0x9E3779B9;  // 2^32 / golden ratio

INLINE uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352D;
  x ^= x >> 15;
  x *= 0x846CA68B;
  return x ^ x >> 16;
}

// counter.derive_key(key, 1), which mixes in the low and the high half of each word; the high halves are 0 here.
INLINE uint32_t second_key(uint32_t key) {
  uint32_t derived = 0;
  for (const uint32_t half : {key, 0u, 1u, 0u}) derived = mix(derived ^ half) + kGolden;
  return derived;
}

struct Mask {
  uint32_t key, second;
  int32_t threshold;  // an element is kept when its word, as a signed number, is at least this
  float scale;        // 1 / (1 - drop)

  Mask(int64_t key_word, double drop)
      : key(static_cast<uint32_t>(key_word)),
        second(second_key(key)),
        threshold(static_cast<int32_t>(std::min(std::nearbyint(drop * 0x1p32) - 0x1p31, 0x1p31 - 1))),
        scale(static_cast<float>(1.0 / (1.0 - drop))) {}

  // Returns the part of the hash that all channels of a sample and position share.
  uint32_t row(int64_t sample, int64_t position) const {
    const auto id = static_cast<uint64_t>(sample), high = static_cast<uint64_t>(sample >> 32);
    return mix(mix(static_cast<uint32_t>(id ^ high * kGolden) + key) ^ static_cast<uint32_t>(position));
  }
};

// Returns 1 / (1 - drop) or 0. It is multiplied, so that NaN and infinities stay visible, as in the reference.
INLINE float factor(uint32_t row, uint32_t second, int32_t threshold, float scale, int64_t channel) {
  const uint32_t word = mix((row + static_cast<uint32_t>(channel) * kGolden) ^ second);
  return static_cast<int32_t>(word) >= threshold ? scale : 0.0f;
}

template <typename T>
INLINE void dropout_add_row(const Mask& mask, uint32_t row, const T* x, const T* residual, T* y, int64_t n) {
  const uint32_t second = mask.second;
  const int32_t threshold = mask.threshold;
  const float scale = mask.scale;
  map(n, y, [&](auto at) {
    return wide(residual, at) + wide(x, at) * factor(row, second, threshold, scale, index(at));
  });
}

template <typename T>
INLINE void dropout_row(const Mask& mask, uint32_t row, const T* x, T* y, int64_t n) {
  const uint32_t second = mask.second;
  const int32_t threshold = mask.threshold;
  const float scale = mask.scale;
  map(n, y, [&](auto at) { return wide(x, at) * factor(row, second, threshold, scale, index(at)); });
}

#define DROPOUT(T)                                                                                                    \
  FOR_EVERY_CPU void dropout_add_loop(const Mask& mask, uint32_t row, const T* x, const T* residual, T* y,            \
                                      int64_t n) {                                                                    \
    dropout_add_row(mask, row, x, residual, y, n);                                                                    \
  }                                                                                                                   \
  FOR_EVERY_CPU void dropout_loop(const Mask& mask, uint32_t row, const T* x, T* y, int64_t n) {                      \
    dropout_row(mask, row, x, y, n);                                                                                  \
  }
FOR_EVERY_TYPE(DROPOUT)
#undef DROPOUT

}  // namespace
