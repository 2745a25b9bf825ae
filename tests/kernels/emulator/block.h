// A block of CUDA threads on one CPU thread: each is a fiber that runs until it meets a barrier.
//
// A barrier opens when all that it is for have come: the threads of the block for __syncthreads, of the warp for a
// shuffle. If none can go on and some have not finished, the threads disagree about which barrier comes next, which hangs
// a GPU or worse; it is an error here. Each warp runs as far as it can before the next one starts, in ascending or
// descending order, so that warps are as far apart as barriers let them be: where one is missing, what is read too early
// is poison, what is read too late has been overwritten, and what depends on who comes first differs between both orders.
// Shared memory is poisoned with NaN before each block, and what lies beyond the bytes of the launch must stay as it was.
//
// Out of scope: tensor cores, inline PTX, atomics, and races that neither order shows.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "cuda_runtime.h"

namespace megazero {
alignas(128) float scratch[1 << 14];
}

namespace emulator {

constexpr int kWarpSize = 32;
constexpr size_t kStack = 1 << 17;

struct Fiber {
  enum State { kReady, kAtWarp, kAtBlock, kDone };
  ucontext_t context{};
  std::unique_ptr<char[]> stack{new char[kStack]};
  State state = kReady;
  double word = 0.0;  // what it shows to its warp
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  ucontext_t scheduler{};
  int current = 0;
  std::function<void()> body;
};
inline Block block;

inline void wait(Fiber::State at) {
  Fiber& fiber = *block.fibers[block.current];
  fiber.state = at;
  swapcontext(&fiber.context, &block.scheduler);
}

inline void run_fiber() {
  block.body();
  wait(Fiber::kDone);
}

// Opens the barrier of `state` over threads [begin, end) if all of them stand there.
inline bool open(int begin, int end, Fiber::State state, bool exited_count) {
  bool any = false;
  for (int i = begin; i < end; ++i) {
    const Fiber::State other = block.fibers[i]->state;
    any |= other == state;
    if (other != state && !(exited_count && other == Fiber::kDone)) return false;
  }
  for (int i = begin; any && i < end; ++i)
    if (block.fibers[i]->state == state) block.fibers[i]->state = Fiber::kReady;
  return any;
}

// Runs a warp as far as it goes without the others; whether it went anywhere.
inline bool run_warp(int begin, int threads, bool descending) {
  const int end = std::min(begin + kWarpSize, threads);
  bool moved = false;
  do {
    for (int k = begin; k < end; ++k) {
      const int i = descending ? end - 1 - (k - begin) : k;
      if (block.fibers[i]->state != Fiber::kReady) continue;
      moved = true;
      block.current = i;
      threadIdx = {static_cast<unsigned>(i), 0, 0};
      swapcontext(&block.scheduler, &block.fibers[i]->context);
    }
  } while (open(begin, end, Fiber::kAtWarp, false));
  return moved;
}

inline void run_block(int threads, bool descending) {
  while (static_cast<int>(block.fibers.size()) < threads) block.fibers.push_back(std::make_unique<Fiber>());
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = *block.fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.state = Fiber::kReady;
    makecontext(&fiber.context, run_fiber, 0);
  }
  const int warps = (threads + kWarpSize - 1) / kWarpSize;
  for (bool live = true; live;) {
    bool moved = false;
    for (int k = 0; k < warps; ++k) moved |= run_warp((descending ? warps - 1 - k : k) * kWarpSize, threads, descending);
    moved |= open(0, threads, Fiber::kAtBlock, true);
    live = std::any_of(block.fibers.begin(), block.fibers.begin() + threads,
                       [](const auto& fiber) { return fiber->state != Fiber::kDone; });
    if (live && !moved) throw std::runtime_error("threads of a block wait at different barriers");
  }
}

// Which blocks of a grid run, and in which order their threads take turns.
struct Settings {
  int64_t multiprocessors = 2, first_block = 0, end_block = INT64_MAX;
  bool descending = false;
};
inline Settings settings;

class Launch {
 public:
  int64_t multiprocessors() const { return settings.multiprocessors; }

  template <typename... Parameters, typename... Arguments>
  void operator()(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared, Arguments... arguments) const {
    grid(kernel, blocks, 1, threads, shared, arguments...);
  }

  template <typename... Parameters, typename... Arguments>
  void grid(void (*kernel)(Parameters...), int64_t x, int y, int threads, int shared, Arguments... arguments) const {
    if (threads < 1 || threads > 1024 || threads % kWarpSize) throw std::runtime_error("a block is 1 to 32 whole warps");
    if (x < 0 || x > INT32_MAX || y > 65535) throw std::runtime_error("a grid that CUDA refuses");
    gridDim = {static_cast<unsigned>(x), static_cast<unsigned>(y), 1};
    blockDim = {static_cast<unsigned>(threads), 1, 1};
    block.body = [&] { kernel(arguments...); };
    auto* memory = reinterpret_cast<unsigned char*>(megazero::scratch);
    for (unsigned row = 0; row < static_cast<unsigned>(y); ++row)
      for (int64_t i = settings.first_block; i < std::min(x, settings.end_block); ++i) {
        blockIdx = {static_cast<unsigned>(i), row, 0};
        std::memset(memory, 0xFF, sizeof megazero::scratch);
        run_block(threads, settings.descending);
        if (std::any_of(memory + shared, memory + sizeof megazero::scratch, [](unsigned char c) { return c != 0xFF; }))
          throw std::runtime_error("shared memory written beyond what the launch gave");
      }
  }
};

template <typename T>
T exchange(T x, int lanes) {
  Fiber& own = *block.fibers[block.current];
  own.word = x;
  wait(Fiber::kAtWarp);
  const T other = static_cast<T>(block.fibers[block.current ^ lanes]->word);
  wait(Fiber::kAtWarp);  // nobody shows its next word before all have read this one
  return other;
}

}  // namespace emulator

inline void __syncthreads() { emulator::wait(emulator::Fiber::kAtBlock); }
inline float __shfl_xor_sync(unsigned, float x, int lanes) { return emulator::exchange(x, lanes); }
inline double __shfl_xor_sync(unsigned, double x, int lanes) { return emulator::exchange(x, lanes); }
