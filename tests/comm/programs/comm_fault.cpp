// A few collectives in order, then what the first argument names goes wrong on the rank of the second.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/world/launch.hpp"
#include "support/meeting.hpp"

namespace {

using namespace std::chrono_literals;

int run(const lockstep::World& world, const std::string& fault, int culprit) {
  const bool mine = world.rank() == culprit;
  const auto deadline = fault == "never" ? 1500ms : std::chrono::milliseconds(30min);
  if (fault == "never") lockstep_test::meet(world);
  lockstep::GlooComm comm{world, {.deadline = deadline}};
  auto tensor = at::ones({1000});
  for (int i = 0; i < 3; ++i) comm.all_reduce(tensor).wait_host();
  if (mine) std::cout << "now" << std::endl;

  if (fault == "throw") {
    auto first = comm.all_reduce(tensor);
    auto second = comm.all_reduce(tensor);
    if (mine) {
      auto third = comm.all_reduce(tensor);
      throw std::runtime_error("boom");
    }
    for (int i = 0; i < 10; ++i) comm.all_reduce(tensor).wait_host();
  } else if (fault == "catch") {
    // The destructors of two communicators are in reach of the exception, each with work in flight.
    try {
      lockstep::GlooComm inner{world};
      auto first = comm.all_reduce(tensor);
      auto second = inner.all_reduce(tensor);
      if (mine) {
        auto third = inner.all_reduce(tensor);
        auto fourth = comm.all_reduce(tensor);
        throw std::runtime_error("boom");
      }
      for (int i = 0; i < 10; ++i) inner.all_reduce(tensor).wait_host();
    } catch (const std::exception& error) {
      std::cerr << "rank " << world.rank() << " caught: " << error.what() << std::endl;
      try {
        comm.barrier();
      } catch (const std::exception& again) {
        std::cerr << "rank " << world.rank() << " again: " << again.what() << std::endl;
      }
      return 3;
    }
  } else if (fault == "abort") {
    if (mine) {
      auto work = comm.all_reduce(tensor);
      comm.abort("the disk is full");
      comm.barrier();
    }
    for (int i = 0; i < 10; ++i) comm.all_reduce(tensor).wait_host();
  } else if (fault == "kill") {
    if (mine) raise(SIGKILL);
    comm.all_reduce(tensor).wait_host();
  } else if (fault == "never") {
    if (mine) sleep(600);
    comm.all_reduce(tensor).wait_host();
  } else if (fault == "early") {
    if (mine) return 0;
    comm.all_reduce(tensor).wait_host();
  } else if (fault == "absent") {
    if (mine) throw std::runtime_error("boom");
    sleep(600);  // busy with something else than collectives
  } else if (fault == "recv") {
    if (!mine) comm.recv(tensor, culprit).wait_host();
    usleep(300000);
    throw std::runtime_error("boom");
  } else if (fault == "bytes") {
    std::vector<std::string> all, more;
    auto first = comm.all_gather_bytes_async(all, std::string(100000, 'x'));
    first.wait_host();
    if (mine) throw std::runtime_error("boom");
    comm.all_gather_bytes_async(more, "y").wait_host();
  } else if (fault == "differ") {
    if (!mine) comm.all_reduce(tensor).wait_host();
    comm.barrier();
  }
  comm.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const std::string fault = argv[1];
  const int culprit = std::atoi(argv[2]);
  if (std::getenv("WITHOUT_LAUNCH")) return run(lockstep::World::from_environment(), fault, culprit);
  return lockstep::launch(argc, argv,
                          [&](const lockstep::World& world) { return run(world, fault, culprit); });
}
