#include "lockstep/world/environment.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/world/detail/cpu_affinity.hpp"
#include "lockstep/world/detail/thread_share.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "world/planned.hpp"

namespace launchers_test {

using namespace lockstep_test;

namespace {

std::optional<lockstep::detail::LaunchedRank> found(Values values) {
  return lockstep::detail::launched_rank(variables(std::move(values)));
}

const Values slurm{{"SLURM_JOB_ID", "12"},
                   {"SLURM_STEP_ID", "0"},
                   {"SLURM_PROCID", "2"},
                   {"SLURM_STEP_NUM_TASKS", "3"},
                   {"SLURM_LOCALID", "0"},
                   {"SLURM_NODEID", "1"},
                   {"SLURM_STEP_TASKS_PER_NODE", "2,1"},
                   {"SLURM_STEP_NODELIST", "n[09-10]"}};

}  // namespace

TEST_CASE("node lists of Slurm") {
  using lockstep::detail::expand_node_list;
  using Names = std::vector<std::string>;
  CHECK(expand_node_list("node7") == Names{"node7"});
  CHECK(expand_node_list("node[01-03,07]") == Names{"node01", "node02", "node03", "node07"});
  CHECK(expand_node_list("n[09-11]") == Names{"n09", "n10", "n11"});
  CHECK(expand_node_list("gpu-[1-2]-[3,5]") == Names{"gpu-1-3", "gpu-1-5", "gpu-2-3", "gpu-2-5"});
  CHECK(expand_node_list("r[1-2]c[01-02]") == Names{"r1c01", "r1c02", "r2c01", "r2c02"});
  CHECK(expand_node_list("x,y[1,3-4],z") == Names{"x", "y1", "y3", "y4", "z"});
  for (const char* wrong : {"", "n[1", "n1]", "n[a-b]", "n[3-1]", "x,,y", "n[]", "n[1,]", "n]1["}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(expand_node_list(wrong), lockstep::UsageError);
  }
}

TEST_CASE("a list of Slurm's cannot exhaust this host") {
  using namespace lockstep::detail;
  const auto begin = std::chrono::steady_clock::now();
  std::string deep = "n";
  for (int i = 0; i < 40'000; ++i) deep += "[0]";
  CHECK_THROWS_AS(expand_node_list(deep), lockstep::UsageError);
  for (const char* endless : {"n[0-999999]-[0-999999]", "n[0-2147483647]", "n[0-65535],n[0-65535]"})
    refuses<lockstep::UsageError>([&] { expand_node_list(endless); },
                                  "SLURM_STEP_NODELIST=" + std::string(endless) +
                                      " names more than 65536 hosts: set MASTER_ADDR to the host of rank 0");
  CHECK(expand_node_list("n[0-65535]").size() == 65536);
  for (const char* endless : {"1(x2147483647)", "1(x65536),1"})
    refuses<lockstep::UsageError>(
        [&] { expand_task_counts(endless); },
        "SLURM_STEP_TASKS_PER_NODE=" + std::string(endless) +
            " names more than 65536 hosts: set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE by hand");
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
}

TEST_CASE("several ranks without the rank of this one are refused, since each process would run on its own") {
  const auto missing = [](const std::string& size, const std::string& name) {
    return size + "=2 is set but " + name +
           " is not: the launcher sets both, so pass its whole environment on, or unset " + size;
  };
  refused({{"OMPI_COMM_WORLD_SIZE", "2"}}, missing("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"));
  refused({{"PMI_SIZE", "2"}}, missing("PMI_SIZE", "PMI_RANK"));
  const Values step{
      {"SLURM_JOB_ID", "12"}, {"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}};
  for (const char* name : {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"})
    refused(changed(step, name, ""), missing("SLURM_STEP_NUM_TASKS", name));
  CHECK(found(step));
  // A launcher of one process sets no more than that.
  for (const char* size : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
    CHECK(!found({{size, "1"}}));
}

TEST_CASE("which launcher has started a process as its only rank, for the line about the run") {
  const auto launcher = [](Values values) {
    const auto env = read(std::move(values));
    CHECK(env.size == 1);
    return env.launcher + " " + env.rank_variables;
  };
  const Values torchrun{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}};
  CHECK(launcher({}) == " ");
  CHECK(launcher(torchrun) == " ");
  CHECK(launcher(changed(torchrun, "TORCHELASTIC_RUN_ID", "none")) == "torchrun RANK, WORLD_SIZE");
  Values step{
      {"SLURM_JOB_ID", "12"}, {"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}};
  CHECK(launcher(step) == "srun SLURM_PROCID, SLURM_STEP_NUM_TASKS");
  CHECK(launcher(changed(slurm, "WORLD_SIZE", "1")) ==
        "srun WORLD_SIZE=1 in place of SLURM_STEP_NUM_TASKS=3");
  step.insert({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}});
  CHECK(launcher(step) == "srun SLURM_PROCID, SLURM_STEP_NUM_TASKS");
  CHECK(launcher({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}) == "mpiexec PMI_RANK, PMI_SIZE");
  CHECK(launcher({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}) ==
        "mpirun of Open MPI OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE");
  CHECK(launcher({{"SLURM_JOB_ID", "12"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}) == " ");  // a script
}

TEST_CASE("task counts of Slurm") {
  using lockstep::detail::expand_task_counts;
  CHECK(expand_task_counts("2,1") == std::vector{2, 1});
  CHECK(expand_task_counts("2(x3),1") == std::vector{2, 2, 2, 1});
  for (const char* wrong : {"", "x", "2(x)", "2(x0)", "2(x2", "2,", "-1"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(expand_task_counts(wrong), lockstep::UsageError);
  }
}

TEST_CASE("a step of Slurm") {
  const auto rank = found(slurm).value();
  CHECK(rank.launcher == "srun");
  CHECK(rank.rank == 2);
  CHECK(rank.size == 3);
  CHECK(rank.local_rank == 0);
  CHECK(rank.local_size == 1);
  CHECK(rank.master_addr == "n09");
  CHECK(rank.master_port == found(changed(slurm, "SLURM_PROCID", "0"))->master_port);
  CHECK(rank.master_port >= 61000);
  CHECK(rank.master_port <= 65535);
  CHECK(rank.master_port != found(changed(slurm, "SLURM_STEP_ID", "1"))->master_port);

  // A script may set LOCAL_RANK for its own purposes: it does not hide the launcher's rank.
  CHECK(read(changed(slurm, "LOCAL_RANK", "0")).rank == 2);
}

TEST_CASE("a batch script of Slurm is not a rank") {
  const Values script{{"SLURM_JOB_ID", "12"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "3"}};
  refused(script, "inside Slurm job 12 of 3 tasks (SLURM_NTASKS) but was not started by srun");
  CHECK(!found(changed(script, "SLURM_NTASKS", "1")));
  CHECK(!found(changed(script, "SLURM_NTASKS", "")));
}

TEST_CASE("the mpirun of Open MPI") {
  const Values mpi{{"OMPI_COMM_WORLD_RANK", "1"},
                   {"OMPI_COMM_WORLD_SIZE", "4"},
                   {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  const auto rank = found(mpi).value();
  CHECK(rank.launcher == "mpirun of Open MPI");
  CHECK(rank.rank == 1);
  CHECK(rank.size == 4);
  CHECK(rank.local_rank == 1);
  CHECK(rank.local_size == 2);
  CHECK(rank.master_addr.empty());
  const auto here = found(changed(mpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "4")).value();
  CHECK(here.master_addr == "127.0.0.1");
  CHECK(here.master_port >= 61000);
  CHECK(!found(changed(changed(mpi, "OMPI_COMM_WORLD_RANK", "0"), "OMPI_COMM_WORLD_SIZE", "1")));
  Values job = changed(mpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "4");
  job["PMIX_NAMESPACE"] = "7";
  CHECK(found(job)->master_port != here.master_port);
}

TEST_CASE("mpiexec of MPICH, and srun with PMI") {
  const Values mpi{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
  const auto rank = found(mpi).value();
  CHECK(rank.launcher == "mpiexec");
  CHECK(rank.rank == 1);
  CHECK(rank.size == 2);
  CHECK(rank.local_rank == 1);
  CHECK(rank.master_addr == "127.0.0.1");
  Values pmi2 = slurm;
  pmi2["PMI_RANK"] = "2";
  pmi2["PMI_SIZE"] = "3";
  CHECK(found(pmi2)->launcher == "srun");
  pmi2["PMI_SIZE"] = pmi2["SLURM_STEP_NUM_TASKS"] = "1";
  pmi2["PMI_RANK"] = pmi2["SLURM_PROCID"] = "0";
  CHECK(!found(pmi2));
}

TEST_CASE("mpirun inside a job of Slurm") {
  // mpirun starts one helper per host under srun, whose variables the ranks inherit.
  Values both = slurm;
  both["OMPI_COMM_WORLD_RANK"] = "5";
  both["OMPI_COMM_WORLD_SIZE"] = "6";
  CHECK(found(both)->rank == 5);
}

TEST_CASE("the environment and the plan follow the launcher") {
  const auto environment = read(slurm);
  CHECK(environment.rank == 2);
  CHECK(environment.size == 3);
  CHECK(environment.local_rank == 0);
  CHECK(environment.local_size == 1);
  CHECK(environment.launched);
  CHECK(environment.rendezvous == "tcp://n09:" + std::to_string(found(slurm)->master_port));
  CHECK(environment.rendezvous_origin.text == "SLURM_STEP_NODELIST=n[09-10], MASTER_PORT from srun");
  CHECK(lockstep::detail::expand_node_list("n[2147483646-2147483647]").size() == 2);

  // srun -m arbitrary puts rank 0 on the first host of a file, which is not the first of the list.
  Values arbitrary = changed(slurm, "SLURM_DISTRIBUTION", "arbitrary");
  refused(arbitrary, "set MASTER_ADDR to the host of rank 0");
  arbitrary["MASTER_ADDR"] = "n10";
  CHECK(read(arbitrary).rendezvous.starts_with("tcp://n10:"));

  Values addressed = slurm;
  addressed["MASTER_ADDR"] = "10.0.0.1";
  addressed["MASTER_PORT"] = "29500";
  addressed["WORLD_SIZE"] = "3";
  CHECK(read(addressed).rendezvous == "tcp://10.0.0.1:29500");

  // srun starts torchrun, which starts the program.
  Values nested = addressed;
  nested.insert({{"RANK", "1"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}});
  CHECK(read(nested).rank == 1);
  CHECK(read(changed(slurm, "WORLD_SIZE", "1")).size == 1);
  CHECK(read(changed(slurm, "SLURM_STEP_NUM_TASKS", "1")).size == 1);

  CHECK(plan({}, slurm).worker);
  refused({"--nproc", "2"}, slurm,
          "--nproc 2 contradicts srun, which has started 1 of 3 ranks on this host "
          "(SLURM_PROCID, SLURM_STEP_NUM_TASKS): leave --nproc out");
  CHECK(plan({"--nproc", "2"}, changed(slurm, "SLURM_STEP_NUM_TASKS", "1")).nproc == 2);

  const Values script{{"SLURM_JOB_ID", "12"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "3"}};
  CHECK_THROWS_AS(plan({}, script), lockstep::UsageError);
  CHECK(plan({"--nproc", "2"}, script).nproc == 2);
  const auto alone = plan({"--nproc", "1"}, script);
  CHECK(alone.worker);
  CHECK(lockstep::read_environment(alone.variables).size == 1);
  // mpirun inside the batch script has started the processes that --nproc names.
  Values inside = script;
  inside.insert({{"OMPI_COMM_WORLD_RANK", "1"},
                 {"OMPI_COMM_WORLD_SIZE", "2"},
                 {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  CHECK(plan({"--nproc", "2"}, inside).worker);
  // One process alone, which is no rank of the job either.
  Values one = script;
  one.insert({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}});
  CHECK(!found(one));
  CHECK(plan({"--nproc", "1"}, one).worker);
  CHECK(plan({"--nproc", "2"}, one).nproc == 2);
  one = script;
  one.insert({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}});
  CHECK(!found(one));

  // A launcher of PMI that assigns no local ranks.
  const Values global{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}};
  CHECK(read(global).rank == 1);
  CHECK(plan({}, global, {.nproc = 2}).worker);
  refused({"--nproc", "2"}, global,
          "--nproc 2 contradicts mpiexec, which has started this process (PMI_RANK, PMI_SIZE): leave --nproc "
          "out");
}

TEST_CASE("only the ranks of torchrun and of --nproc are known to be consecutive on a host") {
  Values torchrun{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}};
  torchrun.insert({{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}});
  CHECK(!read(torchrun).consecutive);  // the same numbers by hand
  for (const char* launcher : {"TORCHELASTIC_RUN_ID", "LOCKSTEP_STORE_IS_HOSTED"})
    CHECK(read(changed(torchrun, launcher, "1")).consecutive);
  CHECK(!read(slurm).consecutive);
}

TEST_CASE("the ranks of one run of a launcher have one secret, those of another run another") {
  const auto secret = [](Values values) { return read(std::move(values)).store_secret; };
  CHECK(secret(slurm) == secret(changed(slurm, "SLURM_PROCID", "0")));
  CHECK(secret(slurm) != secret(changed(slurm, "SLURM_STEP_ID", "977")));
  CHECK(secret(changed(slurm, "LOCKSTEP_STORE_SECRET", "mine")) == "mine");
  const Values one{{"OMPI_COMM_WORLD_RANK", "0"},
                   {"OMPI_COMM_WORLD_SIZE", "2"},
                   {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                   {"PMIX_NAMESPACE", "41"}};
  CHECK(secret(one) == secret(changed(one, "OMPI_COMM_WORLD_RANK", "1")));
  CHECK(secret(one) != secret(changed(one, "PMIX_NAMESPACE", "42")));
  CHECK(secret(changed(one, "PMIX_NAMESPACE", std::string(400, 'n'))).size() <= 256);
}

TEST_CASE("no launcher") {
  CHECK(!found({}));
}

TEST_CASE("PMIx") {
  // srun --mpi=pmix
  Values step = slurm;
  step.insert({{"PMIX_RANK", "2"}, {"PMIX_NAMESPACE", "slurm.pmix.12.0"}});
  CHECK(found(step)->launcher == "srun");
  CHECK(found(step)->rank == 2);
  CHECK(found(step)->master_addr == "n09");
  // The mpirun of Open MPI 5, and prun for a program of Open MPI.
  Values mpi{{"PMIX_RANK", "1"},
             {"PMIX_NAMESPACE", "prterun-n1-7@1"},
             {"OMPI_COMM_WORLD_RANK", "1"},
             {"OMPI_COMM_WORLD_SIZE", "2"},
             {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  CHECK(found(mpi)->launcher == "mpirun of Open MPI");
  CHECK(found(mpi)->rank == 1);
  CHECK(found(mpi)->master_port == found(changed(mpi, "PMIX_RANK", "0"))->master_port);
  // No variable of PMIx holds the number of ranks.
  const Values alone{{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "x"}};
  refused(
      alone,
      "PMIX_RANK=1 is set, but no variable holds the number of ranks: start the program by srun, mpirun or "
      "mpiexec, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or WORLD_SIZE=1 for a process on its own");
  CHECK(read(changed(alone, "WORLD_SIZE", "1")).size == 1);
}

TEST_CASE("torchrun under srun, also with PMIx: torchrun's variables win") {
  Values nested = slurm;
  nested.insert({{"PMIX_RANK", "2"},
                 {"OMPI_COMM_WORLD_RANK", "0"},
                 {"OMPI_COMM_WORLD_SIZE", "9"},
                 {"PMI_RANK", "2"},
                 {"PMI_SIZE", "3"},
                 {"RANK", "5"},
                 {"WORLD_SIZE", "6"},
                 {"LOCAL_RANK", "1"},
                 {"LOCAL_WORLD_SIZE", "2"},
                 {"MASTER_ADDR", "n09"},
                 {"MASTER_PORT", "29400"},
                 {"TORCHELASTIC_RUN_ID", "none"},
                 {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  const auto environment = read(nested);
  CHECK(environment.rank == 5);
  CHECK(environment.size == 6);
  CHECK(environment.local_rank == 1);
  CHECK(environment.rendezvous == "tcp://n09:29400");
  CHECK(environment.store_outlives_attempts);
  CHECK(environment.launcher == "torchrun");
  CHECK(environment.rank_variables == "RANK, WORLD_SIZE");
}

TEST_CASE("a pod of Kubeflow's PyTorchJob is a rank set by hand") {
  const Values pod{{"MASTER_ADDR", "digits-master-0"},
                   {"MASTER_PORT", "23456"},
                   {"WORLD_SIZE", "3"},
                   {"RANK", "2"},
                   {"PET_MASTER_ADDR", "other"},
                   {"PET_MASTER_PORT", "1"},
                   {"PET_NNODES", "3"},
                   {"PET_NODE_RANK", "2"},
                   {"PET_NPROC_PER_NODE", "auto"},
                   {"PYTHONUNBUFFERED", "1"}};
  const auto environment = read(pod);
  CHECK(environment.rank == 2);
  CHECK(environment.size == 3);
  CHECK(environment.rendezvous == "tcp://digits-master-0:23456");
  CHECK(!environment.launched);
  CHECK(!environment.store_is_hosted);
  CHECK(environment.launcher.empty());
  CHECK(plan({}, pod).worker);
}

TEST_CASE("which launcher assigned a rank, for the line about the run") {
  CHECK(read(slurm).launcher == "srun");
  CHECK(read(slurm).rank_variables == "SLURM_PROCID, SLURM_STEP_NUM_TASKS");
  CHECK(read({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}})
            .rank_variables == "PMI_RANK, PMI_SIZE");
  Values hand{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}};
  CHECK(read(hand).launcher.empty());
  CHECK(read(hand).rank_variables == "RANK, WORLD_SIZE");
  CHECK(read(changed(hand, "LOCKSTEP_STORE_IS_HOSTED", "1")).launcher == "--nproc");
  CHECK(read({}).rank_variables.empty());
}

TEST_CASE("variables of a launcher that contradict each other are refused, by name and value") {
  const Values mpi{{"OMPI_COMM_WORLD_RANK", "1"},
                   {"OMPI_COMM_WORLD_SIZE", "4"},
                   {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
  const Values pmi{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "2"}};
  for (
      const auto& [values, words] : std::vector<std::pair<Values, std::string>>{
          {changed(slurm, "SLURM_STEP_NUM_TASKS", ""),
           "SLURM_PROCID=2 is set but SLURM_STEP_NUM_TASKS is not: the launcher sets both, so pass its whole "
           "environment on, or unset SLURM_PROCID"},
          {changed(slurm, "SLURM_PROCID", "3"),
           "SLURM_PROCID=3 is out of range: with SLURM_STEP_NUM_TASKS=3"},
          {changed(slurm, "SLURM_PROCID", "two"), "SLURM_PROCID=two is not a whole number"},
          {changed(slurm, "SLURM_NODEID", "2"), "SLURM_NODEID=2"},
          {changed(slurm, "SLURM_STEP_NODELIST", "n09"),
           "SLURM_STEP_NODELIST=n09 (hosts: 1) contradicts SLURM_STEP_TASKS_PER_NODE="},
          {changed(slurm, "SLURM_STEP_NODELIST", "n[09-"),
           "SLURM_STEP_NODELIST=n[09- cannot be parsed at 'n[09-': set MASTER_ADDR to the host of rank 0"},
          {changed(slurm, "SLURM_STEP_NODELIST", ""), "(SLURM_STEP_NODELIST is not set): set MASTER_ADDR"},
          {changed(slurm, "LOCAL_RANK", "1"),
           "LOCAL_RANK=1 contradicts SLURM_LOCALID=0 of srun: unset LOCAL_RANK"},
          {changed(slurm, "WORLD_SIZE", "4"), "WORLD_SIZE=4 contradicts srun, which has started 3 processes"},
          {changed(slurm, "SLURM_LOCALID", "1"),
           "SLURM_LOCALID=1 is out of range: with 1 rank on this host (SLURM_STEP_TASKS_PER_NODE) it must be "
           "in 0 to 0"},
          {changed(slurm, "SLURM_STEP_TASKS_PER_NODE", "2,x"),
           "SLURM_STEP_TASKS_PER_NODE=2,x cannot be parsed at 'x'"},
          {changed(slurm, "SLURM_STEP_NUM_TASKS", "4"),
           "SLURM_STEP_TASKS_PER_NODE=2,1 (3 tasks in all) contradicts SLURM_STEP_NUM_TASKS=4: pass srun's "
           "whole environment on, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE by hand"},
          {changed(mpi, "OMPI_COMM_WORLD_RANK", "4"), "OMPI_COMM_WORLD_RANK=4 is out of range"},
          {changed(mpi, "OMPI_COMM_WORLD_LOCAL_RANK", "4"),
           "OMPI_COMM_WORLD_LOCAL_RANK=4 is out of range: with 4 ranks on this host"},
          {changed(mpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "5"),
           "OMPI_COMM_WORLD_LOCAL_SIZE=5 contradicts OMPI_COMM_WORLD_SIZE=4"},
          {changed(mpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
           "on every rank (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500)"},
          {changed(mpi, "OMPI_COMM_WORLD_LOCAL_RANK", "2"),
           "OMPI_COMM_WORLD_LOCAL_RANK=2 contradicts OMPI_COMM_WORLD_RANK=1: a rank on this host cannot be "
           "smaller than its number here: pass the launcher's whole environment on, or unset "
           "OMPI_COMM_WORLD_LOCAL_RANK"},
          {changed(mpi, "OMPI_COMM_WORLD_SIZE", ""),
           "OMPI_COMM_WORLD_RANK=1 is set but OMPI_COMM_WORLD_SIZE is not"},
          {pmi, "MPI_LOCALRANKID=2 is out of range"}})
    refused(values, words);
}

TEST_CASE("MASTER_ADDR alone replaces the node list of Slurm") {
  Values unparsable = changed(slurm, "SLURM_STEP_NODELIST", "n[09-");
  unparsable["MASTER_ADDR"] = "n09";
  const auto environment = read(unparsable);
  CHECK(environment.rendezvous == read(slurm).rendezvous);
  CHECK(environment.rendezvous_origin.text == "MASTER_ADDR=n09, MASTER_PORT from srun");
}

TEST_CASE("each rank of a launcher gets its share of the cores that the launcher has") {
  using lockstep::detail::thread_share;
  CHECK(thread_share(16, 16, 4).threads == 4);  // unbound
  CHECK(thread_share(4, 16, 4).threads == 4);   // each bound to its own cores
  CHECK(thread_share(4, 16, 4).source == lockstep::detail::share_of_cores);
  CHECK(thread_share(16, 32, 8).threads == 4);  // each bound to one of two sockets
  CHECK(thread_share(1, 16, 4).threads == 1);   // each bound to one core, which leaves it fewer
  CHECK(thread_share(1, 16, 4).source == lockstep::detail::cores_of_rank);
  CHECK(thread_share(2, 2, 3).threads == 1);
  CHECK(thread_share(2, 0, 0).threads == 1);

  const auto threads = [](Values values) {
    const auto environment = read(values);
    const auto share = lockstep::detail::launched_threads(environment, variables(values));
    return share ? std::optional(share->threads) : std::nullopt;
  };
  Values step = slurm;  // one of the step's tasks on this host
  step["SLURM_CPUS_ON_NODE"] = "1";
  CHECK(threads(step) == 1);
  CHECK(read(step).host_cores == 1);
  step["SLURM_CPUS_PER_TASK"] = "6";
  CHECK(read(step).host_cores == 6);
  CHECK(threads(step) == std::min(6, lockstep::detail::usable_cores()));
  CHECK(threads(slurm) == lockstep::detail::usable_cores());
  CHECK(!threads(changed(slurm, "OMP_NUM_THREADS", "3")));
  CHECK(!threads(changed(slurm, "MKL_NUM_THREADS", "3")));
  Values torchrun{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}};
  torchrun.insert({{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}});
  CHECK(!threads(torchrun));
  CHECK(!threads(changed(torchrun, "TORCHELASTIC_RUN_ID", "none")));
  CHECK(!threads(changed(torchrun, "LOCKSTEP_STORE_IS_HOSTED", "1")));
  CHECK(!threads({}));
}

TEST_CASE("the launcher of a process is its nearest ancestor without the launcher's variable") {
  using namespace lockstep::detail;
  CHECK(parent_of(getpid()) == getppid());
  CHECK(parent_of(-1) == 0);
  CHECK(launcher_process("LOCKSTEP_NO_SUCH_VARIABLE") == getppid());
  CHECK(!started_with(-1, "PATH"));
  setenv("LOCKSTEP_TEST_SET_LATER", "1", 1);
  CHECK(started_with(getpid(), "LOCKSTEP_TEST_SET_LATER") == false);  // /proc shows the initial environment
  unsetenv("LOCKSTEP_TEST_SET_LATER");
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

}  // namespace launchers_test
