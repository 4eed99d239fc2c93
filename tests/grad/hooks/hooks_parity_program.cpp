// Reduces given gradients with lockstep's communication hooks, as tests/grad/hooks/hooks_parity.py tells, on
// several ranks, and writes the averages.
//
// usage: hooks_parity_program --nproc N FOLDER OUTPUT [break]
//        hooks_parity_program --library      (prints the path of the libtorch_cpu.so in use)
//
// With `break`, rank 0 changes one gradient a little, to see that the comparison finds it.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/hooks/compression_hooks.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/hooks/post_local_sgd_hook.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "lockstep/world/launch.hpp"
#include "support/parity_program.hpp"

namespace {

bool broken = false;

struct Case {
  std::string name, hook, plan;  // "40x30,7;20x5x6" is two buckets
  int steps = 0;
  lockstep::PowerSgdOptions power_sgd;
  lockstep::QuantizedOptions quantized;
  lockstep::PostLocalSgdOptions post_local;
};

std::vector<Case> read_cases(const std::string& folder) {
  std::ifstream file(folder + "/cases");
  std::vector<Case> cases;
  Case c;
  auto& p = c.power_sgd;
  while (file >> c.name >> c.hook >> c.plan >> c.steps >> p.matrix_approximation_rank >> p.start_iteration >>
         p.min_compression_rate >> p.use_error_feedback >> p.warm_start >> p.orthogonalization_epsilon >>
         p.seed >> c.quantized.channel >> c.post_local.reduce_in_subgroup) {
    c.post_local.start_iteration = p.start_iteration;
    c.quantized.per_channel = c.quantized.channel > 0;
    if (!c.quantized.per_channel) c.quantized.channel = 1;
    cases.push_back(c);
  }
  return cases;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

std::vector<lockstep::GradientBucket> make_buckets(const std::string& plan) {
  std::vector<lockstep::GradientBucket> buckets;
  std::size_t parameter = 0;
  const auto groups = split(plan, ';');
  for (const std::string& group : groups) {
    lockstep::GradientBucket bucket;
    bucket.index = static_cast<std::int64_t>(buckets.size());
    bucket.count = static_cast<std::int64_t>(groups.size());
    std::vector<std::vector<std::int64_t>> shapes;
    std::int64_t length = 0;
    for (const std::string& text : split(group, ',')) {
      shapes.emplace_back();
      for (const std::string& size : split(text, 'x')) shapes.back().push_back(std::stoll(size));
      length += c10::multiply_integers(shapes.back());
    }
    bucket.flat = torch::empty({length});
    std::int64_t offset = 0;
    for (const auto& shape : shapes) {
      const std::int64_t numel = c10::multiply_integers(shape);
      bucket.gradients.push_back(bucket.flat.narrow(0, offset, numel).view(shape));
      bucket.parameters.push_back(parameter++);
      offset += numel;
    }
    buckets.push_back(std::move(bucket));
  }
  return buckets;
}

template <class Hook>
void reduce(const Case& c, Hook hook, lockstep::CpuComm& comm, const std::string& folder,
            const std::string& output) {
  const std::string rank = "." + std::to_string(comm.rank());
  std::ifstream input(folder + "/" + c.name + rank, std::ios::binary);
  std::ofstream averages(output + "/" + c.name + rank, std::ios::binary);
  auto buckets = make_buckets(c.plan);
  std::vector<double> times;
  for (int step = 0; step < c.steps; ++step) {
    for (auto& bucket : buckets) {
      bucket.iteration = step;
      input.read(static_cast<char*>(bucket.flat.data_ptr()),
                 static_cast<std::streamsize>(bucket.flat.nbytes()));
      if (broken && comm.rank() == 0) bucket.flat[0].mul_(1.1);
    }
    comm.barrier();
    const auto start = std::chrono::steady_clock::now();
    using Handle = decltype(hook.start(comm, buckets[0]));
    std::vector<Handle> under_way;
    under_way.reserve(buckets.size());
    for (const auto& bucket : buckets) under_way.push_back(hook.start(comm, bucket));
    for (auto& reduction : under_way) reduction.wait();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    if (step > 1) times.push_back(time.count());
    for (const auto& bucket : buckets)
      averages.write(static_cast<const char*>(bucket.flat.const_data_ptr()),
                     static_cast<std::streamsize>(bucket.flat.nbytes()));
  }
  std::sort(times.begin(), times.end());
  if (comm.rank() == 0)
    std::cout << c.name << " bytes " << hook.wire_bytes() << " ms " << times[times.size() / 2] << std::endl;
}

/// `subgroup`: rank 0 alone, or the others together.
void run(const Case& c, lockstep::CpuComm& comm, lockstep::CpuComm& subgroup, const std::string& folder,
         const std::string& output) {
  if (c.hook == "post_local_sgd")
    return reduce(c, lockstep::PostLocalSgdHook(subgroup, c.post_local), comm, folder, output);
  if (c.hook == "fp16") return reduce(c, lockstep::Fp16Hook(), comm, folder, output);
  if (c.hook == "bf16") return reduce(c, lockstep::Bf16Hook(), comm, folder, output);
  if (c.hook == "no_op") return reduce(c, lockstep::NoOpHook(), comm, folder, output);
  if (c.hook == "quantized") return reduce(c, lockstep::QuantizedHook(c.quantized), comm, folder, output);
  if (c.hook == "power_sgd") return reduce(c, lockstep::PowerSgdHook(c.power_sgd), comm, folder, output);
  throw lockstep::UsageError("there is no hook named " + c.hook);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words = lockstep_test::own_words(argc, argv);
  if (words.at(0) == "--library") return lockstep_test::print_library(), 0;
  broken = words.size() > 2;
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    at::set_num_threads(1);
    lockstep::CpuComm comm{world};
    std::vector<int> others;
    for (int rank = 1; rank < comm.size(); ++rank) others.push_back(rank);
    auto first = comm.new_group({0}), rest = comm.new_group(others);
    for (const Case& c : read_cases(words[0])) run(c, comm, first ? *first : *rest, words[0], words.at(1));
    (first ? *first : *rest).shutdown();
    comm.shutdown();
  });
}
