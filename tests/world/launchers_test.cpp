#include "lockstep/world/detail/environment.hpp"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/world/detail/host_share.hpp"
#include "lockstep/world/detail/process.hpp"
#include "lockstep/world/detail/rank_identity.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "world/planned.hpp"

namespace launchers_test {

using namespace lockstep_test;

namespace {

const Values slurm{{"SLURM_JOB_ID", "12"},
                   {"SLURM_STEP_ID", "0"},
                   {"SLURM_PROCID", "2"},
                   {"SLURM_STEP_NUM_TASKS", "3"},
                   {"SLURM_LOCALID", "0"},
                   {"SLURM_NODEID", "1"},
                   {"SLURM_STEP_TASKS_PER_NODE", "2,1"},
                   {"SLURM_STEP_NODELIST", "n[09-10]"}};
const Values one_task{{"SLURM_JOB_ID", "12"},
                      {"SLURM_STEP_ID", "0"},
                      {"SLURM_PROCID", "0"},
                      {"SLURM_STEP_NUM_TASKS", "1"},
                      {"SLURM_LOCALID", "0"},
                      {"SLURM_NODEID", "0"},
                      {"SLURM_STEP_TASKS_PER_NODE", "1"},
                      {"SLURM_STEP_NODELIST", "n09"}};

}  // namespace

TEST_CASE("the first host of a node list of Slurm") {
  const auto first = [](const std::string& list) {
    return lockstep::detail::parse_rendezvous(read(changed(slurm, "SLURM_STEP_NODELIST", list)).rendezvous)
        .host;
  };
  CHECK(first("node7") == "node7");
  CHECK(first("n[09-11]") == "n09");
  CHECK(first("gpu-[3,5]-[1-2],x") == "gpu-3-1");
  CHECK(first("r[1-2]c[01-02]") == "r1c01");
  CHECK(first("x,y[1,3-4]") == "x");
  for (const char* wrong : {"n[1", "n1]", "n[a-b]", "n[]", "n]1["})
    refused(
        changed(slurm, "SLURM_STEP_NODELIST", wrong),
        fmt::format("SLURM_STEP_NODELIST={} cannot be parsed: set MASTER_ADDR to the host of rank 0", wrong));
}

TEST_CASE("several ranks without the rank of this one are refused, since each process would run on its own") {
  const auto missing = [](const std::string& size, const std::string& name) {
    return size + "=2 is set but " + name +
           " is not: the launcher sets both, so pass its whole environment on, or unset " + size;
  };
  refused({{"OMPI_COMM_WORLD_SIZE", "2"}}, missing("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"));
  refused({{"PMI_SIZE", "2"}}, missing("PMI_SIZE", "PMI_RANK"));
  refused({{"SLURM_JOB_ID", "12"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}},
          missing("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"));
  // A launcher of one process sets no more than that.
  for (const char* size : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
    CHECK(read({{size, "1"}}).size == 1);
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

TEST_CASE("the number of tasks of this host in the counts of Slurm") {
  const auto tasks = [](const std::string& counts, int node) {
    Values values = changed(slurm, "SLURM_STEP_TASKS_PER_NODE", counts);
    values["SLURM_NODEID"] = std::to_string(node);
    const auto env = read(values);
    return env.launched ? env.local_size : 0;
  };
  CHECK(tasks("2,1", 0) == 2);
  CHECK(tasks("2,1", 1) == 1);
  CHECK(tasks("2(x3),1", 2) == 2);
  CHECK(tasks("2(x3),1", 3) == 1);
  // Unknown: the ranks find out their places when they have joined.
  CHECK(tasks("2,1", 2) == 0);
  for (const char* wrong : {"", "x", "2(x)", "2(x0)", "2(x", "-1"}) CHECK(tasks(wrong, 0) == 0);
}

TEST_CASE("a step of Slurm") {
  const auto rank = read(slurm);
  CHECK(rank.launcher == "srun");
  CHECK(rank.rank == 2);
  CHECK(rank.size == 3);
  CHECK(rank.local_rank == 0);
  CHECK(rank.local_size == 1);
  CHECK(rank.launched);
  const auto [host, port] = lockstep::detail::parse_rendezvous(rank.rendezvous);
  CHECK(host == "n09");
  CHECK(port >= 61000);
  CHECK(port <= 65535);
  CHECK(rank.rendezvous == read(changed(slurm, "SLURM_PROCID", "0")).rendezvous);
  CHECK(rank.rendezvous != read(changed(slurm, "SLURM_STEP_ID", "1")).rendezvous);
  CHECK(rank.rendezvous_origin == "SLURM_STEP_NODELIST=n[09-10], a port derived from the job");

  CHECK(read(changed(slurm, "LOCAL_RANK", "1")).local_rank == 0);  // left from elsewhere: srun has said it
  // Without the job two of them would take each other for one.
  refused(changed(slurm, "SLURM_JOB_ID", ""), "SLURM_PROCID=2 is set but SLURM_JOB_ID is not");
}

TEST_CASE("a script may say the place on the host that a launcher leaves open") {
  Values variables{{"PMI_RANK", "1"},
                   {"PMI_SIZE", "2"},
                   {"MASTER_ADDR", "a"},
                   {"MASTER_PORT", "29500"},
                   {"LOCAL_RANK", "1"}};
  CHECK(read(variables).expected_local_rank == 1);
  variables["LOCAL_WORLD_SIZE"] = "2";
  const auto rank = read(variables);
  CHECK(rank.launched);
  CHECK(rank.local_rank == 1);
  CHECK(rank.local_size == 2);
  refused(changed(variables, "LOCAL_WORLD_SIZE", "1"), "LOCAL_RANK=1 is out of range");
}

TEST_CASE("a batch script of Slurm is not a rank") {
  const Values script{{"SLURM_JOB_ID", "12"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "3"}};
  refused(script, "inside Slurm job 12 of 3 tasks (SLURM_NTASKS) but was not started by srun");
  CHECK(read(changed(script, "SLURM_NTASKS", "1")).size == 1);
  CHECK(read(changed(script, "SLURM_NTASKS", "")).size == 1);
}

TEST_CASE("the mpirun of Open MPI") {
  const Values mpi{{"OMPI_COMM_WORLD_RANK", "1"},
                   {"OMPI_COMM_WORLD_SIZE", "4"},
                   {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
  const auto rank = read(mpi);
  CHECK(rank.launcher == "mpirun of Open MPI");
  CHECK(rank.rank == 1);
  CHECK(rank.size == 4);
  CHECK(rank.local_rank == 1);
  CHECK(rank.local_size == 4);
  CHECK(rank.rendezvous_origin == "the loopback address, a port derived from the job");
  const auto [host, port] = lockstep::detail::parse_rendezvous(rank.rendezvous);
  CHECK(host == "127.0.0.1");
  CHECK(port >= 61000);
  CHECK(read(changed(mpi, "PMIX_NAMESPACE", "7")).rendezvous != rank.rendezvous);
  Values addressed = changed(changed(mpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "2"), "MASTER_ADDR", "h");
  refused(addressed,
          "mpirun of Open MPI has started ranks on several hosts and names no address");  // no port
  addressed["MASTER_PORT"] = "29500";
  CHECK(read(addressed).rendezvous == "tcp://h:29500");
  CHECK(read({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}).size == 1);
}

TEST_CASE("mpiexec of MPICH, and srun with PMI") {
  const Values mpi{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
  const auto rank = read(mpi);
  CHECK(rank.launcher == "mpiexec");
  CHECK(rank.rank == 1);
  CHECK(rank.size == 2);
  CHECK(rank.local_rank == 1);
  CHECK(rank.rendezvous.starts_with("tcp://127.0.0.1:6"));
  Values pmi2 = slurm;
  pmi2["PMI_RANK"] = "2";
  pmi2["PMI_SIZE"] = "3";
  CHECK(read(pmi2).launcher == "srun");
  pmi2["PMI_SIZE"] = pmi2["SLURM_STEP_NUM_TASKS"] = "1";
  pmi2["PMI_RANK"] = pmi2["SLURM_PROCID"] = "0";
  CHECK(read(pmi2).size == 1);
}

TEST_CASE("mpirun inside a job of Slurm") {
  // mpirun starts one helper per host under srun, whose variables the ranks inherit.
  Values both = slurm;
  both["OMPI_COMM_WORLD_RANK"] = "5";
  both["OMPI_COMM_WORLD_SIZE"] = "6";
  both["MASTER_ADDR"] = "h";
  both["MASTER_PORT"] = "1";
  CHECK(read(both).rank == 5);
}

TEST_CASE("what the user sets wins over the launcher") {
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
  CHECK(read(one_task).size == 1);
}

TEST_CASE("launch follows the launcher that has started it") {
  CHECK(plan({}, slurm).worker);
  CHECK(plan({}, slurm, {.nproc = 2}).worker);
  const Values two = changed(changed(slurm, "SLURM_NODEID", "0"), "SLURM_PROCID", "1");
  refused({"--nproc", "3"}, two,
          "--nproc 3 contradicts srun, which has started 2 of 3 ranks on this host (SLURM_PROCID, "
          "SLURM_STEP_NUM_TASKS): leave --nproc out, or start one process on each host");
  CHECK(plan({"--nproc", "2"}, two).worker);
  CHECK(plan({}, two, {.gpus = "0,1,2"}).worker);
  CHECK(plan({"--nproc", "2"}, one_task).nproc == 2);

  const Values script{{"SLURM_JOB_ID", "12"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "3"}};
  CHECK_THROWS_AS(plan({}, script), lockstep::UsageError);
  CHECK(plan({"--nproc", "2"}, script).nproc == 2);
  CHECK(plan({"--nproc", "2"}, script).environment.rendezvous.empty());
  const auto alone = plan({"--nproc", "1"}, script);
  CHECK(alone.worker);
  CHECK(alone.environment.size == 1);
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
  CHECK(plan({}, one).environment.size == 1);
  CHECK(plan({"--nproc", "1"}, one).worker);
  CHECK(plan({"--nproc", "2"}, one).nproc == 2);
  one = script;
  one.insert({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}});
  CHECK(read(one).size == 1);

  // A launcher of PMI that assigns no local ranks.
  const Values global{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}};
  CHECK(read(global).rank == 1);
  CHECK(plan({}, global, {.nproc = 2}).worker);
  refused({"--nproc", "2"}, global,
          "--nproc 2 contradicts mpiexec, which has started this process (PMI_RANK, PMI_SIZE): leave --nproc "
          "out, or start one process on each host");
}

TEST_CASE("one process of another launcher on each host starts the ranks of its host") {
  const Values step = changed(changed(slurm, "SLURM_STEP_TASKS_PER_NODE", "1(x3)"), "SLURM_NODEID", "2");
  const auto third = plan({"--nproc", "4"}, step);
  const auto& env = third.environment;
  CHECK_FALSE(third.worker);
  CHECK(third.nproc == 4);
  CHECK(env.rank == 8);
  CHECK(env.size == 12);
  CHECK(env.rendezvous == read(step).rendezvous);
  CHECK(env.store_secret == read(step).store_secret);
  CHECK_FALSE(env.store_secret.empty());
  const auto jobs = jobs_of(third, env.rendezvous, env.store_secret);
  REQUIRE(jobs.size() == 4);
  // A rank reads torchrun's variables, beside which those of srun do not count.
  Values rank = step;
  for (const auto& assignment : jobs[3].environment)
    if (const auto equals = assignment.find('='); equals != std::string::npos)
      rank[assignment.substr(0, equals)] = assignment.substr(equals + 1);
  CHECK(plan({"--nproc", "4"}, rank).worker);
  const auto last = read(rank);
  CHECK(last.rank == 11);
  CHECK(last.size == 12);
  CHECK(last.local_rank == 3);
  CHECK(last.local_size == 4);
  CHECK(last.consecutive);
  CHECK(last.store_is_hosted);
  CHECK(last.rendezvous == env.rendezvous);
  CHECK(last.store_secret == env.store_secret);
  CHECK(last.launcher == "srun with --nproc");
  CHECK(last.rank_variables.empty());  // they are not the user's
  CHECK(last.rendezvous_origin.empty());

  CHECK(plan({}, step, {.gpus = "0,1"}).environment.size == 6);
  // A default, which the launcher's number of processes replaces.
  CHECK(plan({}, step, {.nproc = 4}).worker);
  CHECK(plan({"--nproc", "1"}, step).worker);
  CHECK(plan({"--nproc", "4"}, changed(step, "WORLD_SIZE", "12")).environment.size == 12);
  refused({"--nproc", "4"}, changed(step, "WORLD_SIZE", "8"), "WORLD_SIZE=8 contradicts srun");
  Values mpi{{"OMPI_COMM_WORLD_RANK", "1"},
             {"OMPI_COMM_WORLD_SIZE", "2"},
             {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
             {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}};
  refused({"--nproc", "3"}, mpi, "names no address");
  mpi.insert({{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}});
  CHECK(plan({"--nproc", "3"}, mpi).environment.rank == 3);
}

TEST_CASE("ranks of different programs are named") {
  const auto warning = [](const std::vector<std::string>& programs) {
    std::vector<lockstep::detail::RankIdentity> ranks(programs.size());
    for (std::size_t i = 0; i < programs.size(); ++i) ranks[i].program = programs[i];
    return different_programs(ranks);
  };
  CHECK(warning({"", ""}).empty());
  CHECK(warning({"mnist 77", "mnist 77", "mnist 1f"}) ==
        "warning: the ranks run different programs: mnist 77 on ranks 0 and 1, mnist 1f on rank 2; build and "
        "copy one to every host");
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

TEST_CASE("PMIx") {
  // srun --mpi=pmix
  Values step = slurm;
  step.insert({{"PMIX_RANK", "2"}, {"PMIX_NAMESPACE", "slurm.pmix.12.0"}});
  CHECK(read(step).launcher == "srun");
  CHECK(read(step).rank == 2);
  CHECK(read(step).rendezvous.starts_with("tcp://n09:"));
  // The mpirun of Open MPI 5, and prun for a program of Open MPI.
  Values mpi{{"PMIX_RANK", "1"},
             {"PMIX_NAMESPACE", "prterun-n1-7@1"},
             {"OMPI_COMM_WORLD_RANK", "1"},
             {"OMPI_COMM_WORLD_SIZE", "2"},
             {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  CHECK(read(mpi).launcher == "mpirun of Open MPI");
  CHECK(read(mpi).rank == 1);
  CHECK(read(mpi).rendezvous == read(changed(mpi, "PMIX_RANK", "0")).rendezvous);
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
          {changed(slurm, "SLURM_PROCID", "two"), "SLURM_PROCID='two' is not a whole number"},
          {changed(slurm, "SLURM_STEP_NODELIST", ""),
           "srun has started ranks on several hosts and names no address"},
          {changed(slurm, "WORLD_SIZE", "4"), "WORLD_SIZE=4 contradicts srun, which has started 3 processes"},
          {changed(slurm, "SLURM_LOCALID", "1"),
           "SLURM_LOCALID=1 is out of range: with SLURM_STEP_TASKS_PER_NODE=2,1 it must be in 0 to 0: pass "
           "the launcher's whole environment on"},
          {changed(mpi, "OMPI_COMM_WORLD_RANK", "4"), "OMPI_COMM_WORLD_RANK=4 is out of range"},
          {changed(mpi, "OMPI_COMM_WORLD_LOCAL_RANK", "4"),
           "OMPI_COMM_WORLD_LOCAL_RANK=4 is out of range: with OMPI_COMM_WORLD_LOCAL_SIZE=4"},
          {changed(mpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "5"),
           "OMPI_COMM_WORLD_LOCAL_SIZE=5 is out of range: with OMPI_COMM_WORLD_SIZE=4"},
          {changed(mpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
           "on every rank (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500)"},
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
  CHECK(environment.rendezvous_origin == "MASTER_ADDR=n09, a port derived from the job");
}

TEST_CASE("each rank of a launcher gets its share of the cores that the launcher has") {
  using lockstep::detail::thread_share;
  CHECK(thread_share(16, 16, 4) == 4);  // unbound
  CHECK(thread_share(4, 16, 4) == 4);   // each bound to its own cores
  CHECK(thread_share(16, 32, 8) == 4);  // each bound to one of two sockets
  CHECK(thread_share(1, 16, 4) == 1);   // each bound to one core, which leaves it fewer
  CHECK(thread_share(2, 2, 3) == 1);
  CHECK(thread_share(2, 0, 0) == 1);

  const auto threads = [](Values values) {
    return lockstep::detail::launched_threads(read(values), variables(values));
  };
  Values step = slurm;  // one of the step's tasks on this host
  step["SLURM_CPUS_ON_NODE"] = "1";
  CHECK(threads(step) == 1);
  step["SLURM_CPUS_PER_TASK"] = "6";
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
  CHECK(parent_and_cpu_time(getpid()).first == getppid());
  CHECK(parent_and_cpu_time(-1).first == 0);
  CHECK(launcher_process("LOCKSTEP_NO_SUCH_VARIABLE") == getppid());
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
