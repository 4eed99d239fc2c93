#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "fake_device.hpp"
#include "lockstep/comm/nccl/comm.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep_test {

/// Runs `body(world)` on so many ranks of the machine, each a thread with a world of its own, and returns
/// what each threw, by rank: nothing where it threw nothing.
template <class Body>
std::vector<std::string> run_ranks(FakeMachine& machine, int size, Body body) {
  using namespace lockstep;
  auto listener = lockstep::detail::listen_on(0, false);
  const int port = listener.port;
  const StorePtr host =
      lockstep::detail::host_tcp_store("localhost", std::move(listener), std::chrono::seconds(30));
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
        if (size > 1) environment.rendezvous = fmt::format("tcp://127.0.0.1:{}", port);
        environment.store_is_hosted = true;
        const World world(environment);
        body(world);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
      machine.leave();
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// The same where no rank may throw, and the log must be clean.
template <class Body>
void run_clean_ranks(FakeMachine& machine, int size, Body body) {
  for (const std::string& error : run_ranks(machine, size, body)) CHECK(error == "");
  for (const std::string& violation : machine.violations()) CHECK(violation == "");
}

using FakeComm = lockstep::BasicNcclComm<FakeDevice>;

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

}  // namespace lockstep_test
