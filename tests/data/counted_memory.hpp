#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>

namespace lockstep_test {

/// While it lives, counts the memory of CPU tensors: what was asked for since then, and how much of that is held.
class CountedTensors {
 public:
  CountedTensors() : counting_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(&counting_, priority); }
  ~CountedTensors() { c10::SetCPUAllocator(counting_.real, priority); }
  CountedTensors(const CountedTensors&) = delete;
  CountedTensors& operator=(const CountedTensors&) = delete;

  /// Bytes.
  [[nodiscard]] std::int64_t asked() const { return Counting::asked; }
  [[nodiscard]] std::int64_t held() const { return Counting::held; }

 private:
  static constexpr std::uint8_t priority = 100;

  struct Counting : c10::Allocator {
    explicit Counting(c10::Allocator* real) : real(real) { asked = held = 0; }
    c10::DataPtr allocate(std::size_t bytes) override {
      struct Piece {
        c10::DataPtr memory;
        std::int64_t bytes;
      };
      auto* piece = new Piece{real->allocate(bytes), static_cast<std::int64_t>(bytes)};
      asked += piece->bytes;
      held += piece->bytes;
      const auto free = [](void* context) {
        held -= static_cast<Piece*>(context)->bytes;
        delete static_cast<Piece*>(context);
      };
      return {piece->memory.get(), piece, free, c10::Device(c10::DeviceType::CPU)};
    }
    void copy_data(void* to, const void* from, std::size_t count) const override {
      default_copy_data(to, from, count);
    }
    c10::Allocator* real;
    static inline std::atomic<std::int64_t> asked{0}, held{0};
  };

  Counting counting_;
};

}  // namespace lockstep_test
