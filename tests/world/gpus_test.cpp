#include "lockstep/world/detail/host_share.hpp"

#include <string>

#include "support/catch.hpp"
#include "world/planned.hpp"

namespace gpus_test {

using namespace lockstep_test;

namespace {

auto plan_on(const std::string& gpus, Values values, std::vector<std::string> arguments = {}) {
  return plan(std::move(arguments), std::move(values), {.gpus = gpus});
}

// Rank `local` of `size` on the second of two equal hosts.
lockstep::detail::Environment rank_of(int local, int size) {
  lockstep::detail::Environment environment;
  environment.rank = size + local;
  environment.size = 2 * size;
  environment.local_rank = local;
  environment.local_size = size;
  return environment;
}

int gpu(int local, int size, int visible, std::optional<int> wanted = {}, Values values = {}) {
  return gpu_of_rank(rank_of(local, size), visible, wanted, std::move(values));
}

void gpu_refused(int local, int size, int visible, std::optional<int> wanted, Values values,
                 const std::string& words) {
  refuses<lockstep::UsageError>([&] { gpu(local, size, visible, wanted, std::move(values)); }, words);
}

}  // namespace

TEST_CASE("GPUs are listed by number, each once") {
  CHECK(plan_on("0,1", {}).nproc == 2);
  CHECK(plan_on("7", {}).nproc == 1);
  for (const char* bad : {",", "0,", "all", "0, 1", "-1", "0-3"})
    refuses<lockstep::UsageError>([&] { plan_on(bad, {}); }, "is not a list of device numbers");
  refuses<lockstep::UsageError>([] { plan_on("1,0,1", {}); }, "'1,0,1' names GPU 1 twice");
}

TEST_CASE("the GPUs that are asked for are one process each, and all that those see") {
  CHECK(plan_on("2,0", {}).nproc == 2);
  CHECK(plan_on("0,1,2", {}, {"--nproc", "2"}).nproc == 2);
  CHECK(plan_on("3,5", {{"CUDA_VISIBLE_DEVICES", "3,4,5"}}).nproc == 2);
  const auto worker = plan_on("0,1", {{"RANK", "1"},
                                      {"WORLD_SIZE", "2"},
                                      {"LOCAL_RANK", "1"},
                                      {"LOCAL_WORLD_SIZE", "2"},
                                      {"MASTER_ADDR", "a"},
                                      {"MASTER_PORT", "1"}});
  CHECK(worker.worker);
}

TEST_CASE("GPUs that CUDA_VISIBLE_DEVICES leaves out are not taken") {
  for (const auto& [visible, words] :
       {std::pair("3,4", "GPU 0 is asked for, but CUDA_VISIBLE_DEVICES=3,4 leaves it out"),
        {"-1", "leaves it out"},
        {"GPU-8932f937",
         "CUDA_VISIBLE_DEVICES=GPU-8932f937 leaves it out: ask for those in it by number, or unset it"}})
    refuses<lockstep::UsageError>(
        [visible = visible] {
          plan_on("0", {{"CUDA_VISIBLE_DEVICES", visible}});
        },
        words);
}

TEST_CASE("each rank of a host has the GPU of its local rank") {
  CHECK(gpu(0, 4, 4) == 0);
  CHECK(gpu(3, 4, 4) == 3);
  CHECK(gpu(1, 2, 8) == 1);
  CHECK(gpu(3, 4, 1) == 0);  // srun shows each task its own
  CHECK(gpu(0, 2, 4, 3) == 3);
  gpu_refused(0, 2, 4, -1, {}, "rank 2 is to use GPU -1");
}

TEST_CASE("a rank without a GPU is told which it is, what there is and what to do") {
  gpu_refused(0, 2, 0, {}, {}, "rank 2 has no GPU: there is no CUDA device");
  gpu_refused(0, 2, 0, {}, {{"CUDA_VISIBLE_DEVICES", "-1"}}, "no CUDA device (CUDA_VISIBLE_DEVICES=-1)");
  for (const char* words : {"rank 5 is number 3 of the 3 on this host, which has 2 CUDA devices "
                            "(CUDA_VISIBLE_DEVICES=0,1)",
                            "--nproc 2"})
    gpu_refused(2, 3, 2, {}, {{"CUDA_VISIBLE_DEVICES", "0,1"}}, words);
  gpu_refused(0, 2, 1, 1, {}, "rank 2 is to use GPU 1, but it sees 1 CUDA device:");
}

TEST_CASE("ranks share a GPU only where the user says so") {
  const Values allowed{{"NCCL_MULTI_RANK_GPU_ENABLE", "1"}};
  CHECK(gpu(2, 4, 2, {}, allowed) == 0);
  CHECK(gpu(3, 4, 2, {}, allowed) == 1);
  // As NCCL reads it: a number, and none is 0.
  for (const char* no : {"0", "", "no", "00"})
    gpu_refused(2, 4, 2, {}, {{"NCCL_MULTI_RANK_GPU_ENABLE", no}}, "start at most 2 ranks here");
  CHECK(gpu(2, 4, 2, {}, {{"NCCL_MULTI_RANK_GPU_ENABLE", "2"}}) == 0);
}

TEST_CASE("a task of srun --gpus-per-task sees GPUs of its own, also as the host's third rank") {
  const Values own{{"SLURM_GPUS_PER_TASK", "2"}};
  for (const int local : {1, 2}) {
    auto rank = rank_of(local, 4);
    rank.launcher = "srun";
    CHECK(gpu_of_rank(rank, 2, {}, own) == local % 2);
  }
  // The variable of a batch script reaches the ranks of torchrun and --nproc as well.
  gpu_refused(2, 4, 2, {}, {{"SLURM_GPUS_PER_TASK", "2"}}, "start at most 2 ranks here");
}

}  // namespace gpus_test
