// Asynchronous reads and writes of files, many at once, in parallel with the computation.
//
// A transfer moves bytes between memory and a file. It is cut into blocks. At most `depth` blocks are in flight at a
// time, over all transfers of a queue; the others wait in order. There are two engines: io_uring, if the kernel and its
// policy allow it, with one thread that collects completions; or `depth` threads that call pread and pwrite. If the
// system moves only part of a block, the rest is submitted again. A file that ends too early is an error (ENODATA). The
// wait for a transfer returns its first error.
//
// For direct I/O (O_DIRECT) the caller makes addresses, lengths and offsets multiples of the disk's alignment.

#include <errno.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

struct Transfer {
  uint64_t blocks = 0;  // not ended yet
  int error = 0;
};

struct Block {
  int64_t transfer;
  int file;
  bool write;
  char* memory;
  uint64_t bytes, offset;
};

// Shared by both engines: the waiting blocks, and the transfers for which `wait` has not returned yet.
class Queue {
 public:
  explicit Queue(unsigned depth) : depth_(depth) {}
  virtual ~Queue() = default;

  int64_t submit(int file, bool write, char* memory, uint64_t bytes, uint64_t offset, uint64_t block) {
    std::lock_guard lock(mutex_);
    const int64_t ticket = next_++;
    Transfer& transfer = transfers_[ticket];
    for (uint64_t at = 0; at < bytes; at += block) {
      waiting_.push_back({ticket, file, write, memory + at, std::min(block, bytes - at), offset + at});
      ++transfer.blocks;
    }
    start();
    return ticket;
  }

  // Returns 0 or the first error. Each ticket can be waited for once.
  int wait(int64_t ticket) {
    std::unique_lock lock(mutex_);
    auto found = transfers_.find(ticket);
    if (found == transfers_.end()) return EINVAL;
    const Transfer& transfer = found->second;  // stays valid when other transfers are submitted
    ended_.wait(lock, [&] { return transfer.blocks == 0; });
    const int error = transfer.error;
    transfers_.erase(ticket);
    return error;
  }

 protected:
  // Submits waiting blocks, or wakes the threads that do. The caller holds the mutex.
  virtual void start() = 0;

  // Handles the result of a block: bytes moved, or minus errno. The caller holds the mutex.
  void end(Block block, int64_t moved) {
    Transfer& transfer = transfers_.at(block.transfer);
    const bool again = moved == -EINTR || moved == -EAGAIN;
    if (again || (moved > 0 && static_cast<uint64_t>(moved) < block.bytes)) {
      const uint64_t skip = again ? 0 : moved;
      waiting_.push_front(
          {block.transfer, block.file, block.write, block.memory + skip, block.bytes - skip, block.offset + skip});
      return;
    }
    if (moved <= 0 && transfer.error == 0) transfer.error = moved == 0 ? ENODATA : static_cast<int>(-moved);
    if (--transfer.blocks == 0) ended_.notify_all();
  }

  const unsigned depth_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::deque<Block> waiting_;
  std::unordered_map<int64_t, Transfer> transfers_;

 private:
  int64_t next_ = 0;
};

class Threads final : public Queue {
 public:
  explicit Threads(unsigned depth) : Queue(depth) {
    try {
      for (unsigned i = 0; i < depth; ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::exception&) {  // use the threads that could be started
      if (threads_.empty()) throw;
    }
  }

  ~Threads() override {
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  void start() override { work_.notify_all(); }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return closed_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const Block block = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      const ssize_t moved = block.write ? pwrite(block.file, block.memory, block.bytes, block.offset)
                                        : pread(block.file, block.memory, block.bytes, block.offset);
      const int64_t result = moved < 0 ? -static_cast<int64_t>(errno) : moved;
      lock.lock();
      end(block, result);
    }
  }

  std::condition_variable work_;
  std::vector<std::thread> threads_;
  bool closed_ = false;
};

// The two rings of io_uring, mapped into this process. Blocks are submitted with the mutex held; the thread that
// collects completions waits in the kernel without it.
class Ring final : public Queue {
 public:
  Ring(unsigned depth, int* error) : Queue(depth) {
    io_uring_params given{};
    file_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &given));
    if (file_ < 0) {
      *error = errno;
      return;
    }
    if (!(given.features & IORING_FEAT_RW_CUR_POS)) {  // before Linux 5.6: no IORING_OP_READ and IORING_OP_WRITE
      *error = ENOSYS;
      return;
    }
    const size_t submissions = given.sq_off.array + given.sq_entries * sizeof(unsigned);
    const size_t completions = given.cq_off.cqes + given.cq_entries * sizeof(io_uring_cqe);
    char* sq = map(submissions, IORING_OFF_SQ_RING);
    char* cq = map(completions, IORING_OFF_CQ_RING);
    entries_ = reinterpret_cast<io_uring_sqe*>(map(given.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
    if (failed_) {
      *error = ENOMEM;
      return;
    }
    sq_tail_ = at<unsigned>(sq, given.sq_off.tail);
    sq_mask_ = *at<unsigned>(sq, given.sq_off.ring_mask);
    sq_array_ = at<unsigned>(sq, given.sq_off.array);
    cq_head_ = at<unsigned>(cq, given.cq_off.head);
    cq_tail_ = at<unsigned>(cq, given.cq_off.tail);
    cq_mask_ = *at<unsigned>(cq, given.cq_off.ring_mask);
    cqes_ = at<io_uring_cqe>(cq, given.cq_off.cqes);
    under_way_.resize(depth);
    for (unsigned i = 0; i < depth; ++i) free_.push_back(depth - 1 - i);
    collector_ = std::thread([this] { collect(); });
  }

  ~Ring() override {
    if (collector_.joinable()) {
      {
        std::lock_guard lock(mutex_);
        closed_ = true;
      }
      work_.notify_all();
      collector_.join();
    }
    for (const auto& [memory, bytes] : mapped_) munmap(memory, bytes);
    if (file_ >= 0) close(file_);
  }

 private:
  template <class T>
  static T* at(char* ring, unsigned offset) {
    return reinterpret_cast<T*>(ring + offset);
  }

  char* map(size_t bytes, uint64_t offset) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, offset);
    if (memory == MAP_FAILED) {
      failed_ = true;
      return nullptr;
    }
    mapped_.emplace_back(memory, bytes);
    return static_cast<char*>(memory);
  }

  void start() override {
    unsigned added = 0, tail = *sq_tail_;
    while (!waiting_.empty() && !free_.empty()) {
      const unsigned slot = free_.back();
      free_.pop_back();
      const Block& block = under_way_[slot] = waiting_.front();
      waiting_.pop_front();
      io_uring_sqe& entry = entries_[tail & sq_mask_];
      std::memset(&entry, 0, sizeof entry);
      entry.opcode = block.write ? IORING_OP_WRITE : IORING_OP_READ;
      entry.fd = block.file;
      entry.addr = reinterpret_cast<uint64_t>(block.memory);
      entry.len = static_cast<uint32_t>(block.bytes);
      entry.off = block.offset;
      entry.user_data = slot;
      sq_array_[tail & sq_mask_] = tail & sq_mask_;
      ++tail;
      ++added;
    }
    if (added == 0) return;
    std::atomic_ref(*sq_tail_).store(tail, std::memory_order_release);
    with_system_ += added;
    while (added > 0) {
      const long taken = syscall(SYS_io_uring_enter, file_, added, 0, 0, nullptr, 0);
      if (taken > 0) added -= static_cast<unsigned>(taken);
      if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        refuse(added, errno);
        break;
      }
    }
    work_.notify_one();
  }

  // Ends the last `last` blocks put into the ring, which the kernel has not accepted, with an error.
  void refuse(unsigned last, int error) {
    unsigned tail = *sq_tail_;
    for (; last > 0; --last) {
      const unsigned slot = static_cast<unsigned>(entries_[--tail & sq_mask_].user_data);
      free_.push_back(slot);
      --with_system_;
      end(under_way_[slot], -error);
    }
    std::atomic_ref(*sq_tail_).store(tail, std::memory_order_release);
    if (with_system_ == 0) {  // no completion will come that would submit the waiting blocks
      while (!waiting_.empty()) {
        const Block block = waiting_.front();
        waiting_.pop_front();
        end(block, -error);
      }
    }
  }

  void collect() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return closed_ || with_system_ > 0; });
      if (with_system_ == 0) return;
      lock.unlock();
      syscall(SYS_io_uring_enter, file_, 0, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
      lock.lock();
      unsigned head = *cq_head_;
      while (head != std::atomic_ref(*cq_tail_).load(std::memory_order_acquire)) {
        const io_uring_cqe& found = cqes_[head & cq_mask_];
        const unsigned slot = static_cast<unsigned>(found.user_data);
        const Block block = under_way_[slot];
        free_.push_back(slot);
        --with_system_;
        end(block, found.res);
        ++head;
      }
      std::atomic_ref(*cq_head_).store(head, std::memory_order_release);
      start();
    }
  }

  int file_ = -1;
  bool failed_ = false, closed_ = false;
  std::vector<std::pair<void*, size_t>> mapped_;
  io_uring_sqe* entries_ = nullptr;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0, with_system_ = 0;
  io_uring_cqe* cqes_ = nullptr;
  std::vector<Block> under_way_;  // by slot
  std::vector<unsigned> free_;    // slots
  std::condition_variable work_;
  std::thread collector_;
};

}  // namespace

extern "C" {

// Opens a queue with at most `depth` blocks in flight. On failure returns null and sets `error` to an errno value.
void* megazero_disk_open(int ring, unsigned depth, int* error) {
  *error = 0;
  try {
    if (!ring) return static_cast<Queue*>(new Threads(depth));
    auto queue = std::make_unique<Ring>(depth, error);
    return *error ? nullptr : static_cast<Queue*>(queue.release());
  } catch (const std::exception&) {  // no thread could be started
    *error = EAGAIN;
    return nullptr;
  }
}

// Waits until all waiting and submitted blocks have ended, then frees the queue.
void megazero_disk_close(void* queue) { delete static_cast<Queue*>(queue); }

int64_t megazero_disk_submit(
    void* queue, int file, int write, void* memory, uint64_t bytes, uint64_t offset, uint64_t block) {
  return static_cast<Queue*>(queue)->submit(file, write, static_cast<char*>(memory), bytes, offset, block);
}

int megazero_disk_wait(void* queue, int64_t ticket) { return static_cast<Queue*>(queue)->wait(ticket); }
}
