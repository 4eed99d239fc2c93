#include "lockstep/world/detail/gpus.hpp"

#include <cstdlib>
#include <map>
#include <string>

#include "lockstep/world/detail/cpu_affinity.hpp"
#include "lockstep/world/detail/launch_plan.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

namespace gpus_test {

namespace {

using Values = std::map<std::string, std::string>;

lockstep::Variables variables(Values values) {
  return [values = std::move(values)](const char* name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  };
}

lockstep::detail::LaunchPlan plan(const std::string& gpus, Values values,
                                  std::vector<std::string> arguments = {}) {
  arguments.insert(arguments.begin(), "program");
  std::vector<char*> argv;
  for (auto& argument : arguments) argv.push_back(argument.data());
  lockstep::LaunchOptions options;
  options.gpus = gpus;
  return lockstep::detail::plan_launch(static_cast<int>(argv.size()), argv.data(), options,
                                       variables(std::move(values)));
}

// What a UsageError says of `work`.
template <class Work>
std::string refusal(Work&& work) {
  try {
    work();
  } catch (const lockstep::UsageError& error) {
    return error.what();
  }
  return "accepted";
}

// Rank `local` of `size` on the second of two equal hosts.
lockstep::Environment rank_of(int local, int size) {
  lockstep::Environment environment;
  environment.rank = size + local;
  environment.size = 2 * size;
  environment.local_rank = local;
  environment.local_size = size;
  return environment;
}

int gpu(int local, int size, int visible, std::optional<int> wanted = {}, Values values = {}) {
  return lockstep::detail::gpu_of_rank(rank_of(local, size), visible, wanted, variables(std::move(values)));
}

std::string gpu_refusal(int local, int size, int visible, std::optional<int> wanted = {},
                        Values values = {}) {
  return refusal([&] { gpu(local, size, visible, wanted, values); });
}

}  // namespace

TEST_CASE("GPUs are listed by number, each once") {
  CHECK(lockstep::detail::gpu_list("0,1") == std::vector<int>{0, 1});
  CHECK(lockstep::detail::gpu_list("7") == std::vector<int>{7});
  for (const char* bad : {"", ",", "0,", "all", "0, 1", "-1", "0-3"})
    CHECK_THAT(refusal([&] { lockstep::detail::gpu_list(bad); }),
               ContainsSubstring("is not a list of device numbers"));
  CHECK_THAT(refusal([] { lockstep::detail::gpu_list("1,0,1"); }),
             ContainsSubstring("'1,0,1' names GPU 1 twice"));
}

TEST_CASE("the GPUs that are asked for are one process each, and all that those see") {
  const auto two = plan("2,0", {});
  CHECK(two.nproc == 2);
  CHECK(two.visible_devices == "2,0");
  const auto jobs = lockstep::detail::jobs_of(two, "tcp://127.0.0.1:1234");
  REQUIRE(jobs.size() == 2);
  for (const auto& job : jobs) {
    const auto& set = job.environment;
    CHECK(std::count(set.begin(), set.end(), "CUDA_VISIBLE_DEVICES=2,0") == 1);
  }
  CHECK(plan("0,1,2", {}, {"--nproc", "2"}).nproc == 2);
  CHECK(plan("3,5", {{"CUDA_VISIBLE_DEVICES", "3,4,5"}}).visible_devices == "3,5");
  CHECK(plan("", {{"CUDA_VISIBLE_DEVICES", "3,4"}}, {"--nproc", "2"}).visible_devices.empty());
  const auto worker = plan("0,1", {{"RANK", "1"},
                                   {"WORLD_SIZE", "2"},
                                   {"LOCAL_RANK", "1"},
                                   {"LOCAL_WORLD_SIZE", "2"},
                                   {"MASTER_ADDR", "a"},
                                   {"MASTER_PORT", "1"}});
  CHECK(worker.worker);
  CHECK(worker.visible_devices == "0,1");
}

TEST_CASE("GPUs that CUDA_VISIBLE_DEVICES leaves out are not taken") {
  CHECK_THAT(refusal([] {
               plan("0", {{"CUDA_VISIBLE_DEVICES", "3,4"}});
             }),
             ContainsSubstring("GPU 0 is asked for, but CUDA_VISIBLE_DEVICES=3,4 leaves it out"));
  CHECK_THAT(refusal([] {
               plan("0", {{"CUDA_VISIBLE_DEVICES", "-1"}});
             }),
             ContainsSubstring("leaves it out"));
  CHECK_THAT(refusal([] {
               plan("0", {{"CUDA_VISIBLE_DEVICES", "GPU-8932f937"}});
             }),
             ContainsSubstring("CUDA_VISIBLE_DEVICES=GPU-8932f937 names them otherwise"));
}

TEST_CASE("each rank of a host has the GPU of its local rank") {
  CHECK(gpu(0, 4, 4) == 0);
  CHECK(gpu(3, 4, 4) == 3);
  CHECK(gpu(1, 2, 8) == 1);
  CHECK(gpu(3, 4, 1) == 0);  // srun shows each task its own
  CHECK(gpu(0, 2, 4, 3) == 3);
  CHECK_THAT(gpu_refusal(0, 2, 4, -1), ContainsSubstring("rank 2 is to use GPU -1"));
}

TEST_CASE("a rank without a GPU is told which it is, what there is and what to do") {
  CHECK_THAT(gpu_refusal(0, 2, 0), ContainsSubstring("rank 2 has no GPU: there is no CUDA device"));
  CHECK_THAT(gpu_refusal(0, 2, 0, {}, {{"CUDA_VISIBLE_DEVICES", "-1"}}),
             ContainsSubstring("no CUDA device (CUDA_VISIBLE_DEVICES=-1)"));
  const auto third = gpu_refusal(2, 3, 2, {}, {{"CUDA_VISIBLE_DEVICES", "0,1"}});
  CHECK_THAT(third, ContainsSubstring("rank 5 is number 3 of the 3 on this host, which has 2 CUDA devices "
                                      "(CUDA_VISIBLE_DEVICES=0,1)"));
  CHECK_THAT(third, ContainsSubstring("--nproc 2"));
  CHECK_THAT(gpu_refusal(0, 2, 1, 1),
             ContainsSubstring("rank 2 is to use GPU 1, but it sees 1 CUDA device:"));
}

TEST_CASE("ranks share a GPU only where the user says so") {
  const Values allowed{{"NCCL_MULTI_RANK_GPU_ENABLE", "1"}}, not_so{{"NCCL_MULTI_RANK_GPU_ENABLE", "0"}};
  CHECK(gpu(2, 4, 2, {}, allowed) == 0);
  CHECK(gpu(3, 4, 2, {}, allowed) == 1);
  CHECK_THAT(gpu_refusal(2, 4, 2, {}, not_so), ContainsSubstring("start at most 2 ranks here"));
  // As NCCL reads it: a number, and none is 0.
  for (const char* no : {"", "no", "00"})
    CHECK_THAT(gpu_refusal(2, 4, 2, {}, {{"NCCL_MULTI_RANK_GPU_ENABLE", no}}),
               ContainsSubstring("start at most 2 ranks here"));
  CHECK(gpu(2, 4, 2, {}, {{"NCCL_MULTI_RANK_GPU_ENABLE", "2"}}) == 0);
}

TEST_CASE("a task of srun --gpus-per-task sees GPUs of its own, also as the host's third rank") {
  const auto own = variables({{"SLURM_GPUS_PER_TASK", "2"}});
  for (const int local : {1, 2}) {
    auto rank = rank_of(local, 4);
    rank.launcher = "srun";
    CHECK(lockstep::detail::gpu_of_rank(rank, 2, {}, own) == local % 2);
  }
  // The variable of a batch script reaches the ranks of torchrun and --nproc as well.
  CHECK_THAT(gpu_refusal(2, 4, 2, {}, {{"SLURM_GPUS_PER_TASK", "2"}}),
             ContainsSubstring("start at most 2 ranks here"));
}

TEST_CASE("GPUs are counted by the driver's folder, or by the device files where there is none") {
  const char* before = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string kept = before ? before : "";
  unsetenv("CUDA_VISIBLE_DEVICES");
  const TemporaryFolder driver, devices;
  const auto count = [&] {
    return lockstep::detail::visible_gpus(driver.path().c_str(), devices.path().c_str());
  };
  CHECK(count() == 0);
  for (const char* name : {"nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia", "null"})
    devices.write(name, "");
  CHECK(count() == 3);
  driver.write("0000:01:00.0", "");
  CHECK(count() == 1);
  setenv("CUDA_VISIBLE_DEVICES", "-1", 1);
  CHECK(count() == 0);
  if (before)
    setenv("CUDA_VISIBLE_DEVICES", kept.c_str(), 1);
  else
    unsetenv("CUDA_VISIBLE_DEVICES");
}

}  // namespace gpus_test
