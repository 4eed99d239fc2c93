#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_device.hpp"
#include "lockstep/comm/detail/nccl/comm.hpp"
#include "lockstep/grad/detail/poison_check.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep_test {

/// Runs `body(world)` on so many ranks of the machine, each a thread with a world of its own, and returns
/// what each threw, by rank: nothing where it threw nothing. They meet in the store at `url`, hosted by nobody
/// of them, or in a file.
template <class Body>
std::vector<std::string> run_ranks(FakeMachine& machine, int size, Body body, const std::string& url = {}) {
  using namespace lockstep;
  // A file: TCPStore asks the network for the host's name, which can take its time.
  static int runs = 0;
  const std::string file = fmt::format("{}/lockstep-ranks-{}-{}",
                                       std::filesystem::temp_directory_path().string(), getpid(), runs++);
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      machine.sit(rank, "the program", true);
      machine.track_memory();
      try {
        Environment environment;
        environment.rank = environment.local_rank = rank;
        environment.size = environment.local_size = size;
        if (size > 1) environment.rendezvous = url.empty() ? "file://" + file : url;
        environment.store_is_hosted = !url.empty();
        const World world(environment);
        body(world);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
      machine.leave();
    });
  for (std::thread& thread : threads) thread.join();
  std::filesystem::remove(file);
  return errors;
}

/// Nothing in the log, and nothing left behind.
inline void check_clean(FakeMachine& machine) {
  for (const std::string& violation : machine.violations()) CHECK(violation == "");
  CHECK(machine.communicators_left() == 0);
  CHECK(machine.events_left == 0);
  CHECK(machine.streams_left == 0);
}

/// The same where no rank may throw, and the log must be clean.
template <class Body>
void run_clean_ranks(FakeMachine& machine, int size, Body body) {
  for (const std::string& error : run_ranks(machine, size, body)) CHECK(error == "");
  check_clean(machine);
}

using FakeComm = lockstep::detail::BasicNcclComm<FakeDevice>;

/// A check of buckets on the operators' stream of the rank, and an event after it.
class FakeNanCheck {
 public:
  FakeNanCheck() = default;
  FakeNanCheck(FakeNanCheck&& other) noexcept { *this = std::move(other); }
  FakeNanCheck& operator=(FakeNanCheck&& other) noexcept {
    std::swap(machine_, other.machine_);
    std::swap(copied_, other.copied_);
    std::swap(found_, other.found_);
    return *this;
  }
  ~FakeNanCheck() {
    if (copied_) machine_->destroy_event(copied_);
  }

  static bool on_device(const at::Tensor&) { return true; }
  void launch(const std::vector<lockstep::detail::TensorGroup>& groups) {
    auto& seat = FakeMachine::seat();
    machine_ = seat.machine;
    found_ = at::zeros({1}, at::kBool);
    copied_ = machine_->make_event();
    std::vector<at::Tensor> reads;
    for (const auto& group : groups) reads.insert(reads.end(), group.begin(), group.end());
    machine_->issue(seat.current, "a check for NaN", reads, {found_}, [reads, found = found_]() mutable {
      for (const at::Tensor& first : reads) found.logical_or_(first.isnan());
    });
    machine_->record(copied_, seat.current);
  }
  bool read() {
    const bool waits = !machine_->done(copied_);
    if (waits) ++host_waits();
    while (!machine_->done(copied_)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return found_.item<bool>();
  }
  /// How often the host came to a check that was not complete.
  static std::atomic<int>& host_waits() {
    static std::atomic<int> count{0};
    return count;
  }

 private:
  FakeMachine* machine_ = nullptr;
  FakeMachine::Event* copied_ = nullptr;
  at::Tensor found_;
};

/// The communicator with a check of buckets on the machine's streams.
struct CheckedFakeComm : FakeComm {
  using FakeComm::FakeComm;
  using NanCheck = FakeNanCheck;
};

/// A kernel of the operators' stream that writes `value(i)` into every element, whenever the stream comes to
/// it; and one that reads a tensor into numbers of the host.
inline void fill_later(const at::Tensor& tensor, double value) {
  auto& seat = FakeMachine::seat();
  seat.machine->issue(seat.current, "a kernel", {}, {tensor},
                      [to = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                                          at::TensorOptions(tensor.scalar_type())),
                       value]() mutable { to.fill_(value); });
}
inline at::Tensor read_later(const at::Tensor& tensor) {
  auto& seat = FakeMachine::seat();
  at::Tensor result = at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()));
  seat.machine->issue(
      seat.current, "a kernel", {tensor}, {result},
      [to = at::from_blob(result.data_ptr(), result.sizes(), at::TensorOptions(tensor.scalar_type())),
       from = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                            at::TensorOptions(tensor.scalar_type()))]() mutable { to.copy_(from); });
  return result;
}
/// What a tensor holds once the operators' stream has done all.
inline at::Tensor read(const at::Tensor& tensor) {
  auto& seat = FakeMachine::seat();
  const at::Tensor result = read_later(tensor);
  seat.machine->synchronize(seat.current);
  return result;
}

/// A graph of the machine's, as CapturedStep wants one: what is captured on the operators' stream and what
/// joins that. Operators on tensors are no part of it where the machine is eager: they happen in the capture.
class CapturedGraph {
 public:
  template <class Function>
  void on_stream(Function&& function) {
    std::forward<Function>(function)();
  }
  template <class Function>
  void capture(Function&& function) {
    auto& seat = FakeMachine::seat();
    graph_ = seat.machine->begin_capture(seat.current);
    try {
      function();
    } catch (...) {
      seat.machine->end_capture(graph_);
      throw;
    }
    seat.machine->end_capture(graph_);
  }
  void replay() {
    auto& seat = FakeMachine::seat();
    seat.machine->replay(graph_, seat.current);
  }
  [[nodiscard]] c10::Device device() const { return at::kCPU; }

 private:
  FakeGraph* graph_ = nullptr;
};

/// A tensor that will hold `value` when the operators' stream has come so far.
inline at::Tensor later(at::IntArrayRef sizes, double value, at::ScalarType type = at::kFloat) {
  at::Tensor tensor = at::empty(sizes, at::TensorOptions(type));
  fill_later(tensor, value);
  return tensor;
}

// CHECK may be used by one thread at a time: the ranks throw, and the test looks at what they threw.
inline void expect(bool good, const std::string& what) {
  if (!good) throw std::runtime_error("expected " + what);
}
inline void expect_equal(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  if (at::equal(got, wanted.to(got.scalar_type()).expand_as(got))) return;
  std::ostringstream text;
  text << "expected " << what << ": " << wanted << ", got " << got;
  throw std::runtime_error(text.str());
}
inline void expect_text(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos)
    throw std::runtime_error("expected '" + part + "' in '" + text + "'");
}

/// "TimeoutError: rank 1 has not...": what `work` throws, with its type; empty where it throws nothing.
template <class Work>
std::string thrown_by(Work&& work) {
  try {
    work();
  } catch (const lockstep::TimeoutError& error) {
    return std::string("TimeoutError: ") + error.what();
  } catch (const lockstep::PeerError& error) {
    return std::string("PeerError: ") + error.what();
  } catch (const lockstep::CommunicationError& error) {
    return std::string("CommunicationError: ") + error.what();
  } catch (const lockstep::MismatchError& error) {
    return std::string("MismatchError: ") + error.what();
  } catch (const lockstep::UsageError& error) {
    return std::string("UsageError: ") + error.what();
  } catch (const std::exception& error) {
    return std::string("exception: ") + error.what();
  }
  return "";
}

/// A rank that stays away until the test is over for the others, and only then hears what they said.
class Absence {
 public:
  template <class Comm>
  void stay_away(Comm& comm) const {
    while (!over_) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    comm.barrier();
  }
  /// For the rank that the test looks at: over when the guard goes, however it goes.
  [[nodiscard]] auto until_end() {
    struct Guard {
      std::atomic<bool>& over;
      ~Guard() { over = true; }
    };
    return Guard{over_};
  }

 private:
  std::atomic<bool> over_{false};
};

inline lockstep::NcclOptions quick(std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  lockstep::NcclOptions options;
  options.timeout = timeout;
  options.poll = std::chrono::milliseconds(5);
  return options;
}

}  // namespace lockstep_test
