#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace lockstep_test {

/// While one lives, the memory of CPU tensors made on threads that ask for it is that of a fake GPU: whoever
/// wants to knows when the last reference to it goes, and may keep it from being used again until later.
class TrackedMemory : public c10::Allocator {
 public:
  /// Given the block when it is freed; true if it shall be kept, to be given to `discard` later.
  using OnFree = std::function<bool(void*, std::size_t)>;
  /// Given a block that has been made.
  using OnMake = std::function<void(void*, std::size_t)>;

  static TrackedMemory& instance() {
    static auto* tracked = new TrackedMemory();  // tensors outlive whatever is destroyed at the end
    return *tracked;
  }

  struct Block {
    std::size_t bytes = 0;
    const void* owner = nullptr;
    OnFree on_free = {};
    OnMake on_make = {};
  };
  /// What to do with memory that this thread allocates from now on; nothing where on_free is empty.
  static Block& of_this_thread() {
    thread_local Block block;
    return block;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr data = plain_->allocate(bytes);
    if (!of_this_thread().on_free || bytes == 0) return data;
    void* memory = data.release_context();
    {
      std::lock_guard lock(mutex_);
      Block& block = blocks_[memory] = of_this_thread();
      block.bytes = bytes;
    }
    if (of_this_thread().on_make) of_this_thread().on_make(memory, bytes);
    return {memory, memory, &TrackedMemory::free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  /// Nobody wants to know any more what becomes of memory that this one's threads made.
  void forget(const void* owner) {
    std::lock_guard lock(mutex_);
    for (auto& [memory, block] : blocks_)
      if (block.owner == owner) block.on_free = nullptr;
  }

  void discard(void* memory) { plain_->raw_deleter()(memory); }

 private:
  TrackedMemory() : plain_(c10::GetDefaultCPUAllocator()) { c10::SetCPUAllocator(this, 1); }

  static void free_block(void* memory) {
    auto& self = instance();
    std::unique_lock lock(self.mutex_);
    const auto found = self.blocks_.find(memory);
    const Block block = std::move(found->second);
    self.blocks_.erase(found);
    lock.unlock();
    if (!block.on_free || !block.on_free(memory, block.bytes)) self.discard(memory);
  }

  c10::Allocator* plain_;
  std::mutex mutex_;
  std::map<void*, Block> blocks_;
};

}  // namespace lockstep_test
