#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

// Counts what this thread allocates by `new`, libraries included. It replaces the program's operators, so one
// file of a program includes it.
namespace lockstep_test {
inline thread_local long allocations = 0;
inline thread_local std::size_t allocated_bytes = 0;
}  // namespace lockstep_test

void* operator new(std::size_t size) {
  ++lockstep_test::allocations;
  lockstep_test::allocated_bytes += size;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
// Together with its delete: a sanitizer's own would not fit ours.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++lockstep_test::allocations;
  lockstep_test::allocated_bytes += size;
  return std::malloc(size);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
