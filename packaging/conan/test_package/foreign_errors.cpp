// For torch_matrix.py: does lockstep understand what Gloo says in this version of LibTorch? `foreign_errors sizes`: two ranks give an
// all-reduce tensors of different sizes. `foreign_errors closed`: one of them closes its connections.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <lockstep/lockstep.hpp>

namespace {

std::string mode;

// Ends this process by what lockstep makes of the exception that is being handled.
[[noreturn]] void judge() {
  std::string text = "nothing";
  try {
    throw;
  } catch (const std::exception& error) {
    text = error.what();
  }
  const auto found = lockstep::detail::classify(text);
  const bool other_sizes = found.kind == lockstep::detail::ForeignError::other_sizes;
  // What is left of another text is its sentence, without a place in Gloo's source.
  const bool understood = mode == "sizes" ? other_sizes
                                          : !other_sizes && text.find(".cc:") != text.npos &&
                                                found.text.find(".cc:") == text.npos &&
                                                found.text.find('\n') == text.npos;
  std::puts(((understood ? "understood: " : "NOT UNDERSTOOD: ") + (understood ? found.text : text)).c_str());
  std::fflush(stdout);
  _exit(understood ? 0 : 1);
}

void run(int rank, const c10::intrusive_ptr<c10d::Store>& store) {
  auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(30));
  options->devices = {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
  auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, 2, options);
  group->barrier()->wait();
  if (mode == "closed" && rank == 1) return;
  std::vector<at::Tensor> tensors{at::zeros({mode == "sizes" && rank == 1 ? 4096 : 1024})};
  try {
    group->allreduce(tensors)->wait();
  } catch (const std::exception&) {
    judge();
  }
  // The other rank, or a thread of Gloo, may find it.
  std::this_thread::sleep_for(std::chrono::seconds(10));
}

}  // namespace

int main(int argc, char** argv) {
  mode = argc > 1 ? argv[1] : "sizes";
  std::set_terminate(judge);  // Gloo throws on a thread of its own
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::thread other([&] { run(1, store); });
  run(0, store);
  other.join();
  std::puts("NOT UNDERSTOOD: no error");
  return 1;
}
