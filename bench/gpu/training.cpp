// What run.py measures of lockstep, on GPUs or on CPUs:
//   bench_gpu [--nproc N] SYSTEM MODEL PRECISION SIZE STEPS WARMUP [TRACE]
//   bench_gpu [--nproc N] collectives SMALLEST LARGEST [process-group]   (bytes; each size four times the one before)
// SYSTEM: bare (a loop by hand without lockstep's wrapper, one process), local (LocalComm, one process), ddp (NcclComm,
// GlooComm on CPUs), process-group (ProcessGroupComm), captured (CapturedStep, on GPUs). MODEL: convnet, resnet50, gpt.
// PRECISION: fp32, tf32, bf16, fp16. SIZE: full, or small for CPUs. TRACE: a file for LibTorch's profile of one more step.
// Each rank prints one line that begins with BENCH.
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/comm/with_device.hpp"
#include "lockstep/detail/process_group_gloo.hpp"
#include "lockstep/lockstep.hpp"
#include "lockstep/train/captured_step.hpp"
#include "models.hpp"
#ifdef LOCKSTEP_HAS_CUDA
#include <c10/cuda/CUDAFunctions.h>

#include "lockstep/comm/nccl_comm.hpp"
#endif

namespace {

struct Run {
  std::string system, model, precision;
  bool small = false;
  int steps = 0, warmup = 0;
  std::string trace;
};

// The device that with_device would give this rank, without a communicator.
torch::Device local_device([[maybe_unused]] const lockstep::World& world) {
#ifdef LOCKSTEP_HAS_CUDA
  const int gpus = c10::cuda::device_count();
  const auto place = lockstep::detail::state_of(world).current_environment();
  if (lockstep::detail::choose_device(place, gpus, std::nullopt) == lockstep::DeviceKind::gpu) {
    const auto index = static_cast<c10::DeviceIndex>(world.local_rank() % gpus);
    c10::cuda::set_device(index);
    return {torch::kCUDA, index};
  }
#endif
  return torch::kCPU;
}

void synchronize(const torch::Device& device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

// LibTorch's profile of `step`, as a Chrome trace.
void profile(const std::string& path, const torch::Device& device, const std::function<void()>& step) {
  namespace profiler = torch::autograd::profiler;
  const profiler::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  std::set<torch::profiler::impl::ActivityType> activities{torch::profiler::impl::ActivityType::CPU};
  if (device.is_cuda()) activities.insert(torch::profiler::impl::ActivityType::CUDA);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  step();
  synchronize(device);
  profiler::disableProfiler()->save(path);
}

// Seconds of a step. On a GPU ten steps are timed together, so that the host may run ahead as in a training.
std::vector<double> times_of(const Run& run, const torch::Device& device, const std::function<void()>& step) {
  for (int i = 0; i < run.warmup; ++i) step();
  synchronize(device);
  const int together = device.is_cuda() ? 10 : 1;
  std::vector<double> times;
  for (int i = 0; i < run.steps; i += together) {
    const double begin = bench::now();
    for (int k = 0; k < together; ++k) step();
    synchronize(device);
    times.push_back((bench::now() - begin) / together);
  }
  return times;
}

// Prints the times, and then profiles one step. `report` of the reduction is null where there is none.
void measure(const lockstep::World& world, const Run& run, const torch::Device& device, std::int64_t samples,
             const std::function<void()>& step, const std::function<lockstep::DdpReport()>& report) {
  const auto times = times_of(run, device, step);
  const auto quantile = [&](double part) {
    auto sorted = times;
    std::sort(sorted.begin(), sorted.end());
    return sorted[static_cast<std::size_t>(part * static_cast<double>(sorted.size() - 1))];
  };
  std::string numbers =
      fmt::format("\"step\": {:.9f}, \"low\": {:.9f}, \"high\": {:.9f}, \"samples\": {}, \"peak\": {}",
                  quantile(0.5), quantile(0.25), quantile(0.75), samples, lockstep::peak_memory());
  if (report) {
    const lockstep::DdpReport last = report();
    numbers += fmt::format(", \"communication\": {:.9f}, \"exposed\": {:.9f}, \"bucket_bytes\": [",
                           last.communication, last.communication - last.overlap);
    for (std::size_t i = 0; i < last.buckets.size(); ++i)
      numbers += fmt::format("{}{}", i == 0 ? "" : ", ", last.buckets[i].bytes);
    numbers += "]";
  }
  bench::report(world.rank(), numbers);
  if (!run.trace.empty()) {
    // Every rank takes the step; rank 0's is the picture.
    if (world.rank() == 0)
      profile(run.trace, device, step);
    else
      step(), synchronize(device);
  }
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<torch::Tensor>& parameters,
                                                        bool adamw) {
  if (adamw) return std::make_unique<lockstep::AdamW>(parameters, lockstep::AdamWOptions{.lr = 3e-4});
  return std::make_unique<lockstep::SGD>(parameters, lockstep::SGDOptions{.lr = 1e-3, .momentum = 0.9});
}

template <class Precision>
void train_bare(const lockstep::World& world, const Run& run, const torch::Device& device) {
  auto work = bench::make_workload(run.model, run.small, world.rank(), device);
  const auto optimizer = make_optimizer(work.model->parameters(), work.adamw);
  Precision precision;
  measure(
      world, run, device, work.data.size(0),
      [&] {
        const auto loss = precision.forward(
            [&] { return torch::cross_entropy_loss(work.model->forward(work.data), work.target); });
        optimizer->zero_grad();
        precision.scale(loss).backward();
        precision.step(*optimizer);
      },
      nullptr);
}

template <class Precision, class Comm>
void train_ddp(const lockstep::World& world, const Run& run, const torch::Device& device, Comm& comm) {
  auto work = bench::make_workload(run.model, run.small, world.rank(), device);
  lockstep::DistributedDataParallel ddp{work.model, comm};
  const auto optimizer = make_optimizer(ddp.parameters(), work.adamw);
  Precision precision;
  measure(
      world, run, device, work.data.size(0) * comm.size(),
      [&] {
        const auto loss =
            precision.forward([&] { return torch::cross_entropy_loss(ddp(work.data), work.target); });
        optimizer->zero_grad();
        ddp.backward(precision.scale(loss));
        precision.step(*optimizer);
      },
      [&] { return ddp.report(); });
}

#ifdef LOCKSTEP_HAS_CUDA
template <class Precision>
void train_captured(const lockstep::World& world, const Run& run, const torch::Device& device,
                    lockstep::NcclComm& comm) {
  auto work = bench::make_workload(run.model, run.small, world.rank(), device);
  if (work.adamw) throw lockstep::UsageError("captured: give convnet or resnet50");
  lockstep::SGD optimizer{work.model->parameters(),
                          {.momentum = 0.9,
                           .implementation = lockstep::Implementation::fused,
                           .lr_tensor = torch::tensor(1e-3, device)}};
  Precision precision;
  lockstep::CapturedStep step{
      device, work.model, comm, optimizer, precision, [](bench::Task& model, const lockstep::Example& batch) {
        return torch::cross_entropy_loss(model->forward(batch.data), batch.target);
      }};
  lockstep::Example batch{work.data, work.target};
  measure(
      world, run, device, work.data.size(0) * comm.size(), [&] { step(batch); }, nullptr);
}
#endif

template <class Precision, class Comm>
void train_on(const lockstep::World& world, const Run& run, const torch::Device& device, Comm& comm) {
  if (run.system == "ddp") return train_ddp<Precision>(world, run, device, comm);
#ifdef LOCKSTEP_HAS_CUDA
  if constexpr (std::is_same_v<Comm, lockstep::NcclComm>)
    if (run.system == "captured") return train_captured<Precision>(world, run, device, comm);
#endif
  throw lockstep::UsageError("the system is " + run.system +
                             ": give bare, local, ddp or process-group, on GPUs also captured");
}

// LibTorch's own process group of this device, as a program has it that does without lockstep's communicators.
c10::intrusive_ptr<c10d::Backend> process_group(const lockstep::World& world, const torch::Device& device) {
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  if (world.size() > 1) store = c10::make_intrusive<c10d::PrefixStore>("bench", world.store());
#ifdef LOCKSTEP_HAS_CUDA
  if (device.is_cuda()) return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, world.rank(), world.size());
#endif
  auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::minutes(1));
  options->devices = {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, world.rank(), world.size(), std::move(options));
}

template <class Precision>
void train_in(const lockstep::World& world, const Run& run) {
  if (run.system == "process-group") {
    const auto device = local_device(world);
    lockstep::ProcessGroupComm comm{world, process_group(world, device), {.device = device}};
    train_ddp<Precision>(world, run, device, comm);
    comm.shutdown();
    return;
  }
  if (run.system == "bare" || run.system == "local") {
    if (world.size() != 1) throw lockstep::UsageError(run.system + " is for one process: --nproc 1");
    const auto device = local_device(world);
    if (run.system == "bare") return train_bare<Precision>(world, run, device);
    lockstep::LocalComm comm{world};
    return train_ddp<Precision>(world, run, device, comm);
  }
  lockstep::with_device(world, [&](auto comm) {
    train_on<Precision>(world, run, lockstep::comm_device(comm), comm);
    comm.shutdown();
  });
}

void train(const lockstep::World& world, const Run& run) {
  if (run.precision == "fp32") at::globalContext().setAllowTF32CuDNN(false);  // as training.py does
  if (run.precision == "fp32") return train_in<lockstep::Fp32>(world, run);
  if (run.precision == "tf32") return train_in<lockstep::Tf32>(world, run);
  if (run.precision == "bf16") return train_in<lockstep::Bf16>(world, run);
  if (run.precision == "fp16") return train_in<lockstep::Fp16>(world, run);
  throw lockstep::UsageError("the precision is " + run.precision + ": give fp32, tf32, bf16 or fp16");
}

// Seconds of each collective of each size: one line a size and collective.
template <class Comm>
void time_collectives(const lockstep::World& world, Comm& comm, std::int64_t smallest, std::int64_t largest) {
  const auto device = lockstep::comm_device(comm);
  const auto floats = torch::TensorOptions(device).dtype(torch::kFloat);
  const int size = comm.size();
  for (std::int64_t bytes = smallest; bytes <= largest; bytes *= 4) {
    const std::int64_t count = bytes / 4 / size * size;
    if (count == 0) continue;
    auto whole = torch::zeros({count}, floats);
    auto rows = torch::zeros({size, count / size}, floats), row = torch::zeros({count / size}, floats);
    auto others = torch::zeros_like(rows);
    const auto time = [&](const char* name, const std::function<void()>& call) {
      const int together = bytes <= 1 << 20 ? 20 : 5;
      std::vector<double> times;
      for (int repeat = 0; repeat < 6; ++repeat) {
        comm.barrier();
        const double begin = bench::now();
        for (int i = 0; i < together; ++i) call();
        synchronize(device);
        if (repeat > 0) times.push_back((bench::now() - begin) / together);  // the first warms up
      }
      bench::report(world.rank(), fmt::format("\"collective\": \"{}\", \"bytes\": {}, \"seconds\": {:.9f}",
                                              name, count * 4, bench::median(times)));
    };
    time("all_reduce", [&] { comm.all_reduce(whole, lockstep::ReduceOp::sum).wait(); });
    time("all_gather", [&] { comm.all_gather(rows, row).wait(); });
    time("reduce_scatter", [&] { comm.reduce_scatter(row, rows, lockstep::ReduceOp::sum).wait(); });
    time("broadcast", [&] { comm.broadcast(whole, 0).wait(); });
    time("reduce", [&] { comm.reduce(whole, 0, lockstep::ReduceOp::sum).wait(); });
    time("all_to_all", [&] { comm.all_to_all(others, rows).wait(); });
    if (size > 1)  // from rank 0 to rank 1; other ranks wait at the barrier
      time("send_recv", [&] {
        if (comm.rank() == 0) comm.send(whole, 1).wait();
        if (comm.rank() == 1) comm.recv(whole, 0).wait();
      });
  }
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::launch(argc, argv, [](const lockstep::World& world, int count, char** words) {
    const std::vector<std::string> given(words + 1, words + count);
    if (given.size() == 4 && given[0] == "collectives" && given[3] == "process-group") {
      const auto device = local_device(world);
      lockstep::ProcessGroupComm comm{world, process_group(world, device), {.device = device}};
      time_collectives(world, comm, std::stoll(given[1]), std::stoll(given[2]));
      comm.shutdown();
    } else if (given.size() == 3 && given[0] == "collectives") {
      lockstep::with_device(world, [&](auto comm) {
        time_collectives(world, comm, std::stoll(given[1]), std::stoll(given[2]));
        comm.shutdown();
      });
    } else if (given.size() == 6 || given.size() == 7) {
      train(world, {given[0], given[1], given[2], given[3] == "small", std::stoi(given[4]),
                    std::stoi(given[5]), given.size() == 7 ? given[6] : ""});
    } else {
      throw lockstep::UsageError(
          "usage: bench_gpu [--nproc N] SYSTEM MODEL PRECISION SIZE STEPS WARMUP [TRACE], or bench_gpu "
          "[--nproc N] "
          "collectives SMALLEST LARGEST [process-group]");
    }
  });
}
