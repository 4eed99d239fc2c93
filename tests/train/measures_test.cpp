#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/train/profiling.hpp"
#include "support/catch.hpp"
#include "support/text_of.hpp"

namespace measures_test {

namespace {

/// Notes what each thread pushed and popped, in its order, in place of LibTorch's CUDA part.
struct Marks : torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex*, torch::profiler::impl::ProfilerVoidEventStub*,
              std::int64_t*) const override {}
  float elapsed(const torch::profiler::impl::ProfilerVoidEventStub*,
                const torch::profiler::impl::ProfilerVoidEventStub*) const override {
    return 0;
  }
  void mark(const char*) const override {}
  void rangePush(const char* name) const override { add(name); }
  void rangePop() const override { add("pop"); }
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)>) const override {}
  void synchronize() const override {}

  static std::map<std::thread::id, std::vector<std::string>> take() {
    std::lock_guard lock(mutex());
    return std::exchange(all(), {});
  }
  static std::vector<std::string> take_own() { return take()[std::this_thread::get_id()]; }

 private:
  static void add(const std::string& mark) {
    std::lock_guard lock(mutex());
    all()[std::this_thread::get_id()].push_back(mark);
  }
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::map<std::thread::id, std::vector<std::string>>& all() {
    static std::map<std::thread::id, std::vector<std::string>> marks;
    return marks;
  }
};
torch::profiler::impl::ProfilerStubs* stubs_of_torch() {
  static const auto* stubs = torch::profiler::impl::cudaStubs();
  return const_cast<torch::profiler::impl::ProfilerStubs*>(stubs);
}

/// NvtxRanges whose marks are noted.
struct Ranges {
  explicit Ranges(lockstep::NvtxOptions options = {}) {
    static Marks marks;
    stubs_of_torch();  // before they are replaced
    torch::profiler::impl::registerCUDAMethods(&marks);
    ranges.emplace(options);
  }
  std::optional<lockstep::NvtxRanges> ranges;
};
using std::vector;

void reduce() {
  RECORD_FUNCTION("lockstep::finish_reduction", vector<c10::IValue>());
  {
    RECORD_FUNCTION("lockstep::reduce_bucket", vector<c10::IValue>());
    torch::ones({2}).add(1);
  }
}
const vector<std::string> reduced{"lockstep::finish_reduction", "lockstep::reduce_bucket", "pop", "pop"};

}  // namespace

TEST_CASE("ranges are marked while an NvtxRanges lives, and not otherwise") {
  reduce();
  CHECK(Marks::take().empty());
  {
    const Ranges ranges;
    reduce();
    CHECK(Marks::take_own() == reduced);
    {
      RECORD_USER_SCOPE("validation");
      reduce();
    }
    CHECK(Marks::take_own() ==
          vector<std::string>{"validation", reduced[0], reduced[1], "pop", "pop", "pop"});
  }
  reduce();
  CHECK(Marks::take().empty());
}

TEST_CASE("operators are marked where that is asked for, forward and backward") {
  auto weight = torch::ones({3}, torch::TensorOptions().requires_grad(true));
  const auto train = [&] { (weight * 2).sum().backward(); };
  {
    const Ranges ranges;
    train();
    CHECK(Marks::take().empty());
  }
  const Ranges ranges({.operators = true});
  train();
  const auto marks = Marks::take_own();
  CAPTURE(marks);
  for (const char* name : {"aten::mul", "aten::sum", "SumBackward0"})
    CHECK(std::count(marks.begin(), marks.end(), name) >= 1);
  const auto pops = std::count(marks.begin(), marks.end(), "pop");
  CHECK(2 * pops == static_cast<std::ptrdiff_t>(marks.size()));
}

TEST_CASE("each thread's ranges are its own, begun and ended in pairs") {
  const Ranges ranges;
  vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([] {
      for (int step = 0; step < 20; ++step) reduce();
    });
  for (std::thread& thread : threads) thread.join();
  const auto all = Marks::take();
  CHECK(all.size() == 3);
  for (const auto& [thread, marks] : all) {
    REQUIRE(marks.size() == 80);
    for (std::size_t i = 0; i < marks.size(); ++i) CHECK(marks[i] == reduced[i % 4]);
  }
}

TEST_CASE("a range that is open when marking begins or ends is marked whole or not at all") {
  std::optional<Ranges> ranges;
  {
    RECORD_FUNCTION("lockstep::before", vector<c10::IValue>());
    ranges.emplace();
  }
  CHECK(Marks::take().empty());
  {
    RECORD_FUNCTION("lockstep::behind", vector<c10::IValue>());
    ranges.reset();
  }
  CHECK(Marks::take_own() == vector<std::string>{"lockstep::behind", "pop"});
}

TEST_CASE("NVTX without LibTorch's CUDA part is an error that says what to link") {
  torch::profiler::impl::registerCUDAMethods(stubs_of_torch());
  if (torch::profiler::impl::cudaStubs()->enabled()) {
    const lockstep::NvtxRanges ranges;  // nobody listens
    CHECK_NOTHROW(reduce());
    return;
  }
  CHECK_THAT(text_of<lockstep::UsageError>([] { lockstep::NvtxRanges ranges; }),
             ContainsSubstring("link lockstep::cuda"));
}

TEST_CASE("peak memory grows with what is taken, and does not shrink") {
  const auto before = lockstep::peak_memory();
  CHECK(before > (1 << 20));
  constexpr std::int64_t bytes = 256 << 20;
  torch::zeros({bytes}, torch::kByte).fill_(1);  // what is not written to is not resident
  const auto after = lockstep::peak_memory();
  // Some of it may have been there already, in memory that the allocator kept.
  CHECK(after >= before + bytes / 2);
  CHECK(lockstep::peak_memory() >= after);
}

}  // namespace measures_test
