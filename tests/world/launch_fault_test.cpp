#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "lockstep/world/detail/child.hpp"
#include "lockstep/world/detail/cpu_affinity.hpp"
#include "lockstep/world/detail/run_client.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/store_server.hpp"
#include "support/by_hand.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"

namespace launch_fault_test {

using namespace std::chrono_literals;
using lockstep_test::await_sign_in;

using lockstep_test::by_hand;
using lockstep_test::count;
using lockstep_test::processes_left;
using lockstep_test::run;
using lockstep_test::start;
using lockstep_test::test_program;
using lockstep_test::Together;
using Strings = std::vector<std::string>;

namespace {

const std::string program = test_program("world_program");

// A connection that says nothing, once somebody listens.
lockstep::detail::Descriptor connect_to(int port) {
  lockstep::detail::Descriptor fd;
  lockstep::detail::retry_at(
      fmt::format("127.0.0.1:{}", port), 20s,
      [&](auto until) {
        auto attempt = lockstep::detail::try_connect("127.0.0.1", port, until);
        fd = std::move(attempt.fd);
        return attempt.reason;
      },
      [](const std::string&) {});
  return fd;
}

}  // namespace

TEST_CASE("launch runs every rank and ends with 0") {
  const auto result = run({program, "well", "--nproc", "3"});
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  CHECK(result.error.empty());
  for (int rank = 0; rank < 3; ++rank)
    CHECK(count(result.out, fmt::format("[rank {0}] rank {0} of 3, local {0} of 3\n", rank)) == 1);
  CHECK(result.left == 0);
}

TEST_CASE("the line about the run says what started it and the threads of a rank") {
  const auto result = run({program, "well", "--nproc", "3"}, {{"OMP_NUM_THREADS", ""}});
  INFO(result.out << result.error);
  CHECK(result.about_run ==
        fmt::format("lockstep: 3 ranks on 1 host ({}: 3), started by --nproc; threads per rank: {}, from the "
                    "cores of the host divided by its ranks\n",
                    lockstep::detail::host_name(), std::max(1, lockstep::detail::usable_cores() / 3)));
  CHECK(result.error.empty());
  CHECK(run({program, "well", "--nproc", "3"}, {{"LOCKSTEP_LOG_LEVEL", "warning"}}).about_run.empty());
  Together by_hand_each({program, "well"}, 2, {{"OMP_NUM_THREADS", "1"}});
  CHECK(by_hand_each.wait() == std::vector<int>{0, 0});
  CHECK_THAT(by_hand_each[0].about_run(),
             ContainsSubstring("started by hand (RANK, WORLD_SIZE)") &&
                 ContainsSubstring("threads per rank: 1, from OMP_NUM_THREADS\n"));
  CHECK(by_hand_each[1].error().empty());
}

TEST_CASE("without --nproc and GPUs there is one rank") {
  CHECK(count(run({program, "well"}, {{"CUDA_VISIBLE_DEVICES", "-1"}}).out, "rank 0 of 1") == 1);
}

TEST_CASE("bad input ends on one line with exit code 2, before anything starts") {
  struct Case {
    Strings arguments;
    lockstep_test::Variables variables;
    std::string text;
  };
  for (const auto& [arguments, variables, text] : std::vector<Case>{
           {{"well", "--nproc", "0"}, {}, "--nproc 0"},
           {{"well", "--nproc", "-3"}, {}, "--nproc -3"},
           {{"well", "--nproc=three"}, {}, "--nproc three"},
           {{"well", "--prefix", "loud"}, {}, "--prefix loud"},
           {{"well", "--nproc", "2"}, {{"WORLD_SIZE", "3"}}, "WORLD_SIZE=3 contradicts --nproc 2"},
           {{"well"}, by_hand(2, 2, 29999), "RANK=2 is out of range"},
           {{"well"}, {{"RANK", "one"}, {"WORLD_SIZE", "2"}}, "RANK=one"},
           {{"well"},
            {{"WORLD_SIZE", "2"}, {"MASTER_ADDR", "10.99.0.1"}, {"MASTER_PORT", "29500"}},
            "WORLD_SIZE=2 is set but RANK is not"},
           {{"well"}, {{"OMPI_COMM_WORLD_SIZE", "2"}}, "OMPI_COMM_WORLD_SIZE=2 is set but"},
           {{"well", "--nproc", "4"}, by_hand(4, 7, 29999), "WORLD_SIZE=7 allows no rank above 6"},
           {{"well"}, {{"RANK", "1"}, {"WORLD_SIZE", "2"}}, "MASTER_ADDR is not set"},
           {{"well"}, {{"LOCAL_WORLD_SIZE", "two"}}, "LOCAL_WORLD_SIZE=two"},
           {{"well"}, {{"LOCKSTEP_LOG_LEVEL", "loud"}}, "LOCKSTEP_LOG_LEVEL=loud is no level"},
           {{"usage", "--nproc", "3"}, {}, "--epochs -1 is too small"},
           {{"usage", "--nproc", "1"}, {}, "--epochs -1 is too small"}}) {
    Strings command{program};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const auto result = run(command, variables, 20s);
    INFO(result.out << result.error);
    CHECK(result.code == 2);
    CHECK(result.error.starts_with("error: "));
    CHECK_THAT(result.error, ContainsSubstring(text));
    CHECK(count(result.error, "\n") == 1);
    CHECK(result.left == 0);
  }
}

TEST_CASE("standard descriptors that are closed at the start are as /dev/null", "[.release]") {
  for (const std::string closed : {">&-", "2>&-", "<&- >&- 2>&-"})
    for (const int nproc : {1, 2}) {
      CAPTURE(closed, nproc);
      const auto result =
          run({"bash", "-c", fmt::format("exec '{}' well --nproc {} {}", program, nproc, closed)}, {}, 20s);
      CHECK(result.code == 0);
      CHECK(result.left == 0);
    }
  CHECK(run({"bash", "-c", fmt::format("exec '{}' usage --nproc 2 <&- >&- 2>&-", program)}, {}, 20s).code ==
        2);
}

TEST_CASE("a rank that fails is shown once, first, and takes the others with it") {
  struct Case {
    std::string mode, text;
    int code;
  };
  for (const auto& [mode, text, code] :
       std::vector<Case>{{"throws", "failed: std::out_of_range: no such digit", 1},
                         {"torch throws", "failed: c10::Error: a tensor of LibTorch is wrong", 1},
                         {"killed", "died (SIGKILL", 137},
                         {"code", "ended with exit code 5", 5},
                         {"first fails", "failed: the archive is damaged", 1},
                         {"first takes long",
                          "the first on this host, has not finished its local_zero_first after 0.5 s", 1},
                         {"collective in scope", "barrier called inside a rank-zero scope", 1}}) {
    const auto result = run({program, mode, "--nproc", "3"}, {}, 25s);  // the others would wait longer
    INFO(mode << "\n" << result.out << result.error);
    CHECK(result.code == code);
    CHECK(result.error.starts_with("error: rank "));
    CHECK_THAT(result.error, ContainsSubstring(text));
    CHECK(count(result.error, "error: ") == 1);
    CHECK(count(result.error, "\n") == 1);
    CHECK(result.left == 0);
  }
}

TEST_CASE("Ctrl-C ends launched ranks") {
  for (const bool whole_group : {false, true}) {
    auto process = start({program, "waits", "--nproc", "3"});
    for (const char* rank : {"rank 0 of", "rank 1 of", "rank 2 of"}) REQUIRE(process.wait_for_output(rank));
    whole_group ? process.signal_group(SIGINT) : process.signal(SIGINT);
    REQUIRE(process.wait(20s));
    CHECK(process.exit_code() == 130);
    CHECK(processes_left(process.marker()) == 0);
  }
}

TEST_CASE("Ctrl-C typed at a terminal ends launched ranks") {
  auto process = start({program, "waits", "--nproc", "2"}, {}, {.terminal = true});
  for (const char* rank : {"rank 0 of", "rank 1 of"}) REQUIRE(process.wait_for_output(rank));
  process.type("\x03");
  REQUIRE(process.wait(20s));
  CHECK(process.exit_code() == 130);
  CHECK(processes_left(process.marker()) == 0);
}

TEST_CASE("no rank survives a launcher that is killed") {
  auto process = start({program, "waits", "--nproc", "3"});
  for (const char* rank : {"rank 0 of", "rank 1 of", "rank 2 of"}) REQUIRE(process.wait_for_output(rank));
  CHECK(lockstep_test::processes_with(process.marker()).size() == 4);
  process.signal(SIGKILL);
  REQUIRE(process.wait(20s));
  CHECK(processes_left(process.marker()) == 0);
}

TEST_CASE("ranks by hand meet, and the host of the store leaves last") {
  for (const char* mode : {"well", "late"}) {
    Together ranks({program, mode}, 3);
    CHECK(ranks.wait() == std::vector<int>{0, 0, 0});
    for (const auto& process : ranks.all) CHECK(process->error().empty());
  }
}

TEST_CASE("a failure by hand reaches the other ranks through the store") {
  Together ranks({program, "throws"}, 3);
  CHECK(ranks.wait() == std::vector<int>{1, 1, 1});
  for (const auto& process : ranks.all) {
    INFO(process->error());
    CHECK_THAT(process->error(), ContainsSubstring("no such digit"));
    CHECK(count(process->error(), "\n") == 1);
  }
  CHECK(processes_left(ranks.marker) == 0);
}

TEST_CASE("without a launcher the headline names the culprit, not who noticed") {
  Together ranks({program, "throws"}, 3);
  CHECK(ranks.wait() == std::vector<int>{1, 1, 1});
  CHECK(ranks[1].error() == "error: rank 1 failed: std::out_of_range: no such digit\n");
  for (const int other : {0, 2})
    CHECK(ranks[other].error() ==
          fmt::format("error: rank 1 failed first: std::out_of_range: no such digit; noticed by rank {}\n",
                      other));
}

TEST_CASE("SIGTERM of a rank, or of a host, is told to the others as such") {
  const auto where = lockstep::detail::host_name();
  for (const int culprit : {1, 2}) {  // rank 0 hosts the store, which goes with it
    const int number = culprit == 1 ? SIGTERM : SIGINT;
    CAPTURE(culprit);
    Together ranks({program, "waits for failure"}, 3);
    for (int rank = 0; rank < 3; ++rank)
      REQUIRE(ranks[rank].wait_for_output(fmt::format("rank {} of 3", rank)));
    ranks[culprit].signal(number);
    ranks[culprit].signal(number);  // as a scheduler does to a process and to its group
    REQUIRE(ranks[culprit].wait(20s));
    CHECK(ranks[culprit].exit_code() == 128 + number);
    CHECK(ranks[culprit].error().empty());
    for (int other = 0; other < 3; ++other)
      if (other != culprit) {
        REQUIRE(ranks[other].wait(20s));
        CHECK(ranks[other].exit_code() == 1);
        CHECK(ranks[other].error() == fmt::format("error: rank {} ended by SIG{} on {}; noticed by rank {}\n",
                                                  culprit, sigabbrev_np(number), where, other));
      }
  }
  Together hosts;
  const int port = lockstep_test::free_port();
  for (const int first : {0, 2})
    hosts.add({program, "waits for failure", "--nproc", "2"}, by_hand(first, 4, port));
  for (int rank = 0; rank < 4; ++rank)
    REQUIRE(hosts[rank / 2].wait_for_output(fmt::format("rank {} of 4", rank)));
  hosts[1].signal(SIGTERM);
  REQUIRE(hosts[1].wait(20s));
  REQUIRE(hosts[0].wait(20s));
  CHECK(hosts[1].exit_code() == 128 + SIGTERM);
  CHECK(hosts[1].error().empty());
  CHECK(hosts[0].exit_code() == 1);
  INFO(hosts[0].error());
  CHECK(hosts[0].error().starts_with("error: rank "));
  CHECK_THAT(hosts[0].error(),
             ContainsSubstring(fmt::format(" on {}) ended by SIGTERM; noticed by rank ", where)));
}

TEST_CASE("stdout that cannot be written is told with one process as with several") {
  for (const char* nproc : {"1", "2"}) {
    const auto result =
        run({"bash", "-c", fmt::format("exec '{}' well --nproc {} > /dev/full", program, nproc)}, {}, 25s);
    CHECK(result.code == 0);
    CHECK(
        result.error ==
        "warning: stdout cannot be written (No space left on device), so that what follows is lost there\n");
  }
}

TEST_CASE("two hosts by hand with unequal numbers of ranks", "[.release]") {
  for (const char* mode : {"well", "late", "throws", "killed"}) {
    Together hosts;
    const int port = lockstep_test::free_port();
    hosts.add({program, mode, "--nproc", "3"}, by_hand(0, 7, port));
    hosts.add({program, mode, "--nproc", "4"}, by_hand(3, 7, port));
    const auto codes = hosts.wait();
    const auto &a = *hosts.all[0], &b = *hosts.all[1];
    INFO(mode << "\n" << a.out() << a.error() << "---\n" << b.out() << b.error());
    CHECK(processes_left(hosts.marker) == 0);
    if (mode == std::string("well")) {
      CHECK(codes == std::vector<int>{0, 0});
      CHECK_THAT(a.out(), ContainsSubstring("rank 2 of 7, local 2 of 3"));
      CHECK_THAT(b.out(), ContainsSubstring("rank 6 of 7, local 3 of 4"));
      CHECK_THAT(b.out(), ContainsSubstring("rank 3 of 7, local 0 of 4"));
    } else if (mode == std::string("late")) {
      CHECK(codes == std::vector<int>{0, 0});
    } else if (mode == std::string("throws")) {
      CHECK(codes == std::vector<int>{1, 1});
      CHECK(a.error().starts_with("error: rank 1 (pid "));
      CHECK_THAT(b.error(), ContainsSubstring("no such digit"));
    } else {
      CHECK(codes == std::vector<int>{1, 137});
      CHECK(b.error().starts_with("error: rank 6 (pid "));
      CHECK_THAT(a.error(), ContainsSubstring("rank 6 (pid "));
      CHECK_THAT(a.error(), ContainsSubstring("died (SIGKILL"));
    }
    for (const auto* host : {&a, &b})
      CHECK(count(host->error(), "error: ") ==
            (std::string(mode) < "m" || std::string(mode) == "throws" ? (codes[0] == 0 ? 0 : 1) : 0));
  }
}

TEST_CASE("a port in use is named") {
  const auto taken = lockstep::detail::listen_on("", 0);
  for (const Strings& command : {Strings{program, "well"}, Strings{program, "well", "--nproc", "2"}}) {
    const auto result = run(command, by_hand(0, 3, taken.port), 20s);
    INFO(result.error);
    CHECK(result.code == 1);
    CHECK_THAT(result.error, ContainsSubstring(fmt::format("port {} is already in use", taken.port)));
    CHECK(count(result.error, "\n") == 1);
  }
}

TEST_CASE("a master that is not there is told apart from a name that is not known") {
  auto variables = by_hand(1, 2, lockstep_test::free_port());
  variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "1";
  auto result = run({program, "well"}, variables, 20s);
  CHECK(result.code == 1);
  CHECK(result.error ==
        fmt::format(
            "error: rank 1 failed: no store at 127.0.0.1:{0} (MASTER_ADDR=127.0.0.1, MASTER_PORT={0}) after "
            "1 s: it refuses the connection: nothing listens there. Start rank 0 on that "
            "host with the same WORLD_SIZE, or correct the address on every rank\n",
            variables["MASTER_PORT"]));
  variables["MASTER_ADDR"] = "no-such-host.invalid";
  result = run({program, "well"}, variables, 20s);  // 7 s where no name server answers
  CHECK(result.code == 1);
  CHECK_THAT(result.error, ContainsSubstring("no-such-host.invalid"));
  CHECK_THAT(result.error, !ContainsSubstring("nothing listens"));
}

TEST_CASE("two processes that claim one rank are both named, to every rank") {
  Together ranks;
  const int port = lockstep_test::free_port();
  ranks.add({program, "well"}, by_hand(0, 3, port));
  for (int claim = 0; claim < 2; ++claim) ranks.add({program, "waits"}, by_hand(1, 3, port));
  CHECK(ranks.wait() == std::vector<int>{1, 1, 1});
  const auto host = lockstep::detail::host_name();
  const auto claimed = [&](std::size_t first, std::size_t second) {
    return fmt::format(
        "rank 1 is claimed by {0} pid {1} and {0} pid {2}, the latter with RANK=1: give every process its "
        "own RANK "
        "on "
        "{0}, and every run a MASTER_PORT of its own\n",
        host, ranks.all[first]->pid(), ranks.all[second]->pid());
  };
  for (const auto& process : ranks.all) {  // whichever came first
    INFO(process->error());
    CHECK(count(process->error(), claimed(1, 2)) + count(process->error(), claimed(2, 1)) == 1);
    CHECK(count(process->error(), "\n") == 1);
  }
}

TEST_CASE("two processes with RANK=0 on one host are both named within seconds") {
  const auto host = lockstep::detail::host_name();
  const auto begin = std::chrono::steady_clock::now();
  {
    const int port = lockstep_test::free_port();
    Together ranks;
    for (int claim = 0; claim < 2; ++claim) ranks.add({program, "waits"}, by_hand(0, 2, port));
    CHECK(ranks.wait() == std::vector<int>{1, 1});
    for (const auto& process : ranks.all) {
      INFO(process->error());
      CHECK_THAT(process->error(), ContainsSubstring("rank 0 is claimed by " + host + " pid "));
      for (const auto& claimant : ranks.all)
        CHECK_THAT(process->error(), ContainsSubstring(fmt::format("{} pid {}", host, claimant->pid())));
      CHECK_THAT(process->error(),
                 ContainsSubstring(", the latter with RANK=0: give every process its own RANK on " + host +
                                   ", and every run a MASTER_PORT of its own\n"));
      CHECK(count(process->error(), "\n") == 1);
    }
  }
  {
    const int port = lockstep_test::free_port();
    Together hosts;
    for (int claim = 0; claim < 2; ++claim)
      hosts.add({program, "waits", "--nproc", "2"}, by_hand(0, 4, port));
    CHECK(hosts.wait() == std::vector<int>{1, 1});
    for (const auto& process : hosts.all) {
      INFO(process->error());
      CHECK_THAT(process->error(), ContainsSubstring(" is claimed by " + host + " pid "));
      CHECK_THAT(
          process->error(),
          ContainsSubstring(", the latter with RANK=0 and --nproc 2: give every command its own RANK, the "
                            "first of its ranks, and every run a MASTER_PORT of its own\n"));
    }
    CHECK(processes_left(hosts.marker) == 0);
  }
  CHECK(std::chrono::steady_clock::now() - begin < 2 * 10s);
}

TEST_CASE("ranks that disagree on the world size are all told so") {
  Together ranks;
  const int port = lockstep_test::free_port();
  ranks.add({program, "well"}, by_hand(0, 3, port));
  ranks.add({program, "well"}, by_hand(1, 2, port));
  CHECK(ranks.wait() == std::vector<int>{1, 1});
  for (const auto& process : ranks.all) {
    INFO(process->error());
    CHECK(count(process->error(), "rank 1 says world size 2, rank 0 says 3") +
              count(process->error(), "rank 0 says world size 3, rank 1 says 2") ==
          1);
  }
}

TEST_CASE("a host that is started with another world size than a run that is complete is told so",
          "[.release]") {
  // The first host takes its two ranks for all, the second takes the run for one of four.
  Together hosts;
  const int port = lockstep_test::free_port();
  hosts.add({program, "waits", "--nproc", "2"}, by_hand(0, 2, port));
  for (int rank = 0; rank < 2; ++rank) REQUIRE(hosts[0].wait_for_output(fmt::format("rank {} of 2", rank)));
  hosts.add({program, "well", "--nproc", "2"}, by_hand(2, 4, port));
  CHECK(hosts[1].wait(10s));
  CHECK(hosts[1].exit_code() == 1);
  INFO(hosts[1].error());
  CHECK_THAT(hosts[1].error(), ContainsSubstring(" says world size 4, rank ") &&
                                   ContainsSubstring(" says 2. Start all of them with one WORLD_SIZE\n"));
  // Another command for the same ranks.
  hosts.add({program, "well", "--nproc", "2"}, by_hand(0, 2, port));
  CHECK(hosts[2].wait(10s));
  CHECK(hosts[2].exit_code() == 1);
  CHECK_THAT(hosts[2].error(), ContainsSubstring(" is claimed by "));
  CHECK(!hosts[0].wait(1s));  // neither ends the run
  hosts[0].signal(SIGTERM);
  CHECK(hosts[0].wait(20s));
  CHECK(hosts[0].error().empty());
}

TEST_CASE("a process alone opens no port and looks up no name") {
  const auto taken = lockstep::detail::listen_on("127.0.0.1", 0);
  for (const char* address : {"127.0.0.1", "no-such-host.invalid"})
    for (const bool by_flag : {true, false}) {
      CAPTURE(address, by_flag);
      lockstep_test::Variables variables{{"MASTER_ADDR", address},
                                         {"MASTER_PORT", std::to_string(taken.port)}};
      if (!by_flag) variables["WORLD_SIZE"] = "1";
      Strings command{program, "well"};
      if (by_flag) command.insert(command.end(), {"--nproc", "1"});
      const auto result = run(command, variables, 20s);
      CHECK(result.code == 0);
      CHECK(result.error.empty());
      CHECK(count(result.out, "rank 0 of 1, local 0 of 1\n") == 1);
    }
}

TEST_CASE("two ranks of a host with one local rank are both named, to every rank") {
  const auto host = lockstep::detail::host_name();
  const auto ranks_with = [](const std::vector<lockstep_test::Variables>& places) {
    auto ranks = std::make_unique<Together>();
    const int port = lockstep_test::free_port();
    for (std::size_t rank = 0; rank < places.size(); ++rank) {
      auto variables = by_hand(static_cast<int>(rank), static_cast<int>(places.size()), port);
      variables.insert(places[rank].begin(), places[rank].end());
      if (variables.count("SLURM_PROCID") > 0) variables.erase("RANK");
      ranks->add({program, "well"}, variables);
    }
    return ranks;
  };
  const auto by_local = [](const char* rank, const char* size) {
    return lockstep_test::Variables{{"LOCAL_RANK", rank}, {"LOCAL_WORLD_SIZE", size}};
  };
  const auto by_slurm = [](const char* rank) {
    return lockstep_test::Variables{{"SLURM_JOB_ID", "7"},
                                    {"SLURM_STEP_ID", "0"},
                                    {"SLURM_STEP_NUM_TASKS", "2"},
                                    {"SLURM_NODEID", "0"},
                                    {"SLURM_LOCALID", "0"},
                                    {"SLURM_PROCID", rank},
                                    {"SLURM_STEP_TASKS_PER_NODE", "2"}};
  };
  const auto hand = ranks_with({by_local("0", "2"), by_local("0", "2")});
  const auto srun = ranks_with({by_slurm("0"), by_slurm("1")});
  // Launchers imitate several hosts on one: complete sets of local ranks.
  const auto sets =
      ranks_with({by_local("0", "2"), by_local("1", "2"), by_local("0", "1"), by_local("0", "1")});
  for (const auto& [ranks, text] : std::vector<std::pair<Together*, std::string>>{
           {hand.get(), "LOCAL_RANK=0 of 2: pass"},
           {srun.get(),
            "SLURM_LOCALID=0 of 2: pass the launcher's whole environment on to each process, or "}}) {
    CHECK(ranks->wait() == std::vector<int>{1, 1});
    for (const auto& process : ranks->all) {
      INFO(process->error());
      CHECK_THAT(process->error(),
                 ContainsSubstring(fmt::format(": ranks 0 and 1 on {} both have ", host) + text));
      CHECK(count(process->error(), "\n") == 1);
    }
  }
  CHECK(sets->wait() == std::vector<int>{0, 0, 0, 0});
}

TEST_CASE("a local rank alone is taken where it is right, and refused where it is wrong") {
  for (const bool right : {true, false}) {
    Together ranks;
    const int port = lockstep_test::free_port();
    for (int rank : {0, 1}) {
      auto variables = by_hand(rank, 2, port);
      variables["LOCAL_RANK"] = std::to_string(right ? rank : 0);
      ranks.add({program, "well"}, variables);
    }
    CHECK(ranks.wait() == (right ? std::vector<int>{0, 0} : std::vector<int>{1, 1}));
    for (int rank : {0, 1}) {
      INFO(ranks[rank].out() << ranks[rank].error());
      if (right)
        CHECK(count(ranks[rank].out(), fmt::format("rank {0} of 2, local {0} of 2\n", rank)) == 1);
      else
        CHECK_THAT(
            ranks[rank].error(),
            ContainsSubstring(fmt::format(
                ": LOCAL_RANK=0 of rank 1 contradicts the other ranks on {}, among which it is number 1: "
                "set LOCAL_WORLD_SIZE too if that is meant, or unset LOCAL_RANK\n",
                lockstep::detail::host_name())));
    }
  }
}

TEST_CASE("two steps of a job that get one port do not become one run") {
  const auto task = [](const char* step, const char* rank) {
    return lockstep_test::Variables{{"SLURM_JOB_ID", "912"},
                                    {"SLURM_STEP_ID", step},
                                    {"SLURM_STEP_NUM_TASKS", "2"},
                                    {"SLURM_NODEID", "0"},
                                    {"SLURM_LOCALID", rank},
                                    {"SLURM_PROCID", rank},
                                    {"SLURM_STEP_NODELIST", "localhost"},
                                    {"SLURM_STEP_TASKS_PER_NODE", "2"},
                                    {"LOCKSTEP_RENDEZVOUS_TIMEOUT", "20"}};
  };
  Together ranks;  // steps 4 and 15 both hash to port 61885
  ranks.add({program, "well"}, task("4", "0"));
  connect_to(61885);
  ranks.add({program, "well"}, task("15", "1"));
  CHECK(ranks.all[1]->wait(15s));
  INFO(ranks[1].error());
  CHECK_THAT(ranks[1].error(),
             ContainsSubstring(
                 ":61885 (SLURM_STEP_NODELIST=localhost, MASTER_PORT from srun) belongs to another run"));
  ranks.add({program, "well"}, task("4", "1"));
  CHECK(ranks.wait() == std::vector<int>{0, 1, 0});
}

TEST_CASE("under a launcher that lockstep does not know a program sets torchrun's variables itself") {
  Together ranks;
  const int port = lockstep_test::free_port();
  for (const char* rank : {"0", "1"})
    ranks.add({program, "unknown launcher"},
              {{"MADE_UP_RANK", rank}, {"MADE_UP_SIZE", "2"}, {"MADE_UP_PORT", std::to_string(port)}});
  CHECK(ranks.wait() == std::vector<int>{0, 0});
  for (int rank : {0, 1})
    CHECK_THAT(ranks[rank].out(), ContainsSubstring(fmt::format("rank {0} of 2, local {0} of 2\n", rank)));
  CHECK_THAT(ranks[0].about_run(),
             ContainsSubstring(fmt::format(
                 "started by hand (RANK, WORLD_SIZE), rendezvous at tcp://127.0.0.1:{}; ", port)));
}

TEST_CASE("a launcher's single rank writes the line about the run, a process alone does not") {
  const auto error = [](const lockstep_test::Variables& variables) {
    return run({program, "well", "--nproc", "1"}, variables, 20s).error;
  };
  const lockstep_test::Variables one{
      {"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}, {"OMP_NUM_THREADS", "1"}};
  CHECK(
      error(one) ==
      fmt::format("lockstep: 1 rank on 1 host ({}: 1), started by mpirun of Open MPI (OMPI_COMM_WORLD_RANK, "
                  "OMPI_COMM_WORLD_SIZE); threads per rank: 1, from OMP_NUM_THREADS\n",
                  lockstep::detail::host_name()));
  auto quiet = one;
  quiet["LOCKSTEP_LOG_LEVEL"] = "warning";
  CHECK(error(quiet).empty());
  CHECK(error({}).empty());
}

TEST_CASE("a rank that does not come is named while it is waited for, and at the end", "[.release]") {
  const int port = lockstep_test::free_port();
  Together ranks;
  for (int rank : {0, 1}) {
    auto variables = by_hand(rank, 3, port);
    variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "13";
    ranks.add({program, "well"}, variables);
  }
  connect_to(port);  // rank 0 listens
  CHECK_THROWS(lockstep::detail::StoreConnection({"127.0.0.1", port, "of another run"}, 20s));
  const auto doubt = fmt::format(
      "ranks on other hosts cannot reach this one ({}) by the address 127.0.0.1 of rank 0; a process at "
      "127.0.0.1 was refused because its LOCKSTEP_STORE_SECRET differs: give all ranks of a run one, or none",
      lockstep::detail::host_name());
  CHECK(ranks[0].wait_for_output("waiting for rank 2 of 3; " + doubt + "; gives up in "));
  CHECK(ranks.wait(60s) == std::vector<int>{1, 1});
  for (const auto& process : ranks.all)
    CHECK_THAT(process->error(), ContainsSubstring("rank 2 of 3 did not join within 13 s") &&
                                     ContainsSubstring("its LOCKSTEP_STORE_SECRET differs"));
}

TEST_CASE("a rank that fails before all have joined ends those that wait for it") {
  Together ranks;
  const int port = lockstep_test::free_port();
  ranks.add({program, "well"}, by_hand(0, 3, port));
  ranks.add({program, "well"}, by_hand(1, 3, port));
  connect_to(port);  // rank 0 listens
  ranks.add({program, "usage"}, by_hand(2, 3, port));
  CHECK(ranks.wait() == std::vector<int>{1, 1, 2});
  for (int rank : {0, 1}) CHECK_THAT(ranks[rank].error(), ContainsSubstring("--epochs -1 is too small"));
}

TEST_CASE("a rank that ends with a code before it has met the others ends those that wait for it") {
  for (const std::string mode : {"code before meeting", "exit before meeting"}) {
    const auto begin = std::chrono::steady_clock::now();
    Together ranks({program, mode}, 3);
    CHECK(ranks.wait() == std::vector<int>{1, 5, 1});
    CHECK(std::chrono::steady_clock::now() - begin < 10s);
    for (int rank : {0, 2}) {
      INFO(mode << "\n" << ranks[rank].error());
      CHECK(ranks[rank].error() ==
            fmt::format("error: rank 1 ended with exit code 5 on {}; noticed by rank {}\n",
                        lockstep::detail::host_name(), rank));
    }
  }
}

TEST_CASE("a rank that is killed while it waits for others ends those that wait with it", "[.release]") {
  const auto where = lockstep::detail::host_name();
  {
    Together ranks;
    const int port = lockstep_test::free_port();
    for (int rank : {0, 1}) ranks.add({program, "well"}, by_hand(rank, 3, port));
    await_sign_in(port, {0, 1});
    ranks[1].signal(SIGKILL);
    CHECK(ranks[0].wait(8s));
    CHECK(ranks[0].exit_code() == 1);
    CHECK(ranks[0].error() ==
          fmt::format(
              "error: rank 1 has ended before its first communicator ({} pid {}): it was killed, or its "
              "connection broke; look at its output, and start all ranks again; noticed by rank 0\n",
              where, ranks[1].pid()));
  }
  // The whole launching process of a host: nobody is left who could report it.
  Together hosts;
  const int port = lockstep_test::free_port();
  hosts.add({program, "well"}, by_hand(0, 4, port));
  hosts.add({program, "well", "--nproc", "2"}, by_hand(1, 4, port));
  await_sign_in(port, {0, 1, 2});
  hosts[1].signal(SIGKILL);
  CHECK(hosts[0].wait(8s));
  CHECK(hosts[0].exit_code() == 1);
  CHECK_THAT(hosts[0].error(), ContainsSubstring(" has ended before its first communicator (" + where));
  // A launcher that is left names the signal.
  Together watched;
  const int other_port = lockstep_test::free_port();
  watched.add({program, "well"}, by_hand(0, 4, other_port));
  watched.add({program, "well", "--nproc", "2"}, by_hand(1, 4, other_port));
  await_sign_in(other_port, {0, 1, 2});
  for (const pid_t process : lockstep_test::processes_with(watched.marker))
    if (lockstep_test::process_state(process).parent == watched[1].pid()) {
      kill(process, SIGKILL);
      break;
    }
  CHECK(watched[0].wait(8s));
  INFO(watched[0].error());
  CHECK_THAT(watched[0].error(), ContainsSubstring(" died (SIGKILL"));
}

TEST_CASE("a rank that is started again in place of a killed one is told that it cannot replace it") {
  using namespace lockstep::detail;
  const StoreServer server(listen_on("127.0.0.1", 0), "", lockstep::detail::hello_timeout, 10min);
  // The store of a run whose rank 1 has joined and was killed.
  StoreConnection other({"127.0.0.1", server.port()}, 20s);
  {
    StoreConnection rank({"127.0.0.1", server.port()}, 20s);
    rank.request(StoreOperation::join, StoreConnection::Clock::now() + 20s, [](FrameWriter& out) {
      out.value(1).value(3).value(RankIdentity{"nodeB pid 811", "nodeB"}).byte(1);
    });
  }
  while (!RunClient(other, 20s).members({1}).at(0).lost) std::this_thread::sleep_for(10ms);
  Together ranks;
  ranks.add({program, "well"}, by_hand(1, 3, server.port()));
  CHECK(ranks.wait() == std::vector<int>{1});
  CHECK(ranks[0].error() ==
        fmt::format(
            "error: rank 1 failed: rank 1 has ended (nodeB pid 811), and {} pid {} cannot take its place: "
            "start all ranks again\n",
            host_name(), ranks[0].pid()));
}

TEST_CASE("a world of very many ranks gives up in time, and names some that are missing", "[.release]") {
  auto variables = by_hand(0, 1'000'000, lockstep_test::free_port());
  variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "6";
  const auto begin = std::chrono::steady_clock::now();
  const auto result = run({program, "well"}, variables, 100s);
  CHECK(std::chrono::steady_clock::now() - begin < 13s);
  CHECK(result.code == 1);
  INFO(result.error);
  CHECK_THAT(result.error,
             ContainsSubstring("waiting for ranks 1, 2, 3, 4 and 999995 more of 1000000; ") &&
                 ContainsSubstring("ranks 1, 2, 3, 4 and 999995 more of 1000000 did not join within 6 s"));
}

TEST_CASE("rank 0 on another host than MASTER_ADDR names is told") {
  auto variables = by_hand(0, 2, lockstep_test::free_port());
  variables["MASTER_ADDR"] = "192.0.2.1";  // an address for examples: nobody's
  variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "1";
  const auto result = run({program, "well"}, variables, 30s);
  INFO(result.error);
  CHECK(result.code == 1);
  CHECK_THAT(result.error, ContainsSubstring("rank 1 of 2 did not join within 1 s"));
  CHECK_THAT(result.error, ContainsSubstring("MASTER_ADDR=192.0.2.1 is no address of this host"));
  CHECK(count(result.error, "\n") == 1);
}

TEST_CASE("an agent of torchrun that nobody finds is told with its variables, first while it is waited for",
          "[.release]") {
  const int port = lockstep_test::free_port();
  Together ranks;
  for (const char* address : {"127.0.0.1", "no-such-host.invalid"}) {
    auto variables = by_hand(0, 2, port);
    variables["MASTER_ADDR"] = address;
    variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "6";
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
    ranks.add({program, "well"}, variables);
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto where = fmt::format("127.0.0.1:{0} (MASTER_ADDR=127.0.0.1, MASTER_PORT={0})", port);
  REQUIRE(ranks[0].wait_for_output(fmt::format(
      "warning: waiting for the store of torchrun's agent at {}: it refuses the connection: nothing listens "
      "there; gives up in ",
      where)));
  CHECK(std::chrono::steady_clock::now() - begin < 10s);
  CHECK(ranks.wait() == std::vector<int>{1, 1});
  CHECK_THAT(
      ranks[0].error(),
      ContainsSubstring(fmt::format(
          "error: rank 0 failed: no store at {} after 6 s: it refuses the connection: nothing listens "
          "there. torchrun's agent hosts it: look at the output of torchrun and start it again, or unset "
          "TORCHELASTIC_USE_AGENT_STORE if torchrun has not started this process\n",
          where)));
  CHECK_THAT(ranks[1].error(), ContainsSubstring(fmt::format(
                                   "the name 'no-such-host.invalid' of the master host "
                                   "(MASTER_ADDR=no-such-host.invalid, MASTER_PORT={}) cannot be resolved",
                                   port)));
}

TEST_CASE("a listener on MASTER_PORT that never answers is told within the rendezvous timeout",
          "[.release]") {
  const auto mute = lockstep::detail::listen_on("127.0.0.1", 0);
  auto variables = by_hand(1, 2, mute.port);
  variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "1";
  for (const bool agent : {false, true}) {
    if (agent) variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
    const auto result = run({program, "well"}, variables, 30s);
    INFO(result.error);
    CHECK(result.code == 1);
    CHECK_THAT(
        result.error,
        ContainsSubstring(agent ? fmt::format("the store of torchrun's agent at 127.0.0.1:{0} "
                                              "(MASTER_ADDR=127.0.0.1, MASTER_PORT={0}) does not answer "
                                              "after 1 s: look at the output of torchrun on that host, "
                                              "and start it again\n",
                                              mute.port)
                                : "something listens there, but does not answer"));
    CHECK(count(result.error, "\n") == 1);
  }
}

TEST_CASE("a stranger's byte on the port of the store holds up neither the ranks nor the end") {
  using namespace lockstep::detail;
  const int port = lockstep_test::free_port();
  for (const bool launched : {false, true}) {
    Together ranks;
    if (launched) {
      for (int host : {0, 2}) ranks.add({program, "late", "--nproc", "2"}, by_hand(host, 4, port));
    } else {
      for (int rank : {0, 1, 2}) ranks.add({program, "late"}, by_hand(rank, 3, port));
    }
    const auto stranger = connect_to(port);
    REQUIRE(send(stranger.get(), "\0", 1, MSG_NOSIGNAL) == 1);
    CHECK(ranks.wait() == std::vector<int>(ranks.all.size(), 0));
    CHECK(processes_left(ranks.marker) == 0);
  }
}

TEST_CASE("a stranger without the secret of a run cannot touch its store") {
  using namespace lockstep::detail;
  auto variables = by_hand(0, 2, lockstep_test::free_port());
  const int port = std::stoi(variables["MASTER_PORT"]);
  variables["LOCKSTEP_STORE_SECRET"] = "of this run";
  Together ranks;
  ranks.add({program, "well"}, variables);
  CHECK_THROWS_WITH(StoreConnection({"127.0.0.1", port}, 20s), ContainsSubstring("belongs to another run"));
  variables["RANK"] = "1";
  ranks.add({program, "well"}, variables);
  CHECK(ranks.wait() == std::vector<int>{0, 0});
}

TEST_CASE("a failure's text cannot drive the terminal of another rank") {
  Together ranks({program, "throws controls"}, 2);
  CHECK(ranks.wait() == std::vector<int>{1, 1});
  INFO(ranks[0].error());
  CHECK_THAT(ranks[0].error(), ContainsSubstring("bad \\x1b[2Jfile\\nerror: rank 7 failed"));
  CHECK(count(ranks[0].error(), "\n") == 1);
}

TEST_CASE("without a launcher one rank of a host works first in local_zero_first, each time", "[.release]") {
  const auto file = fmt::format("/tmp/lockstep_first_{}", lockstep_test::new_marker());
  {
    Together ranks({program, "first twice", file}, 3);
    CHECK(ranks.wait() == std::vector<int>{0, 0, 0});
    for (int rank : {0, 1, 2}) {
      INFO(ranks[rank].error());
      CHECK_THAT(ranks[rank].out(), ContainsSubstring(fmt::format("local {} of 3, order kept\n", rank)));
    }
  }
  for (const char* end : {"0", "1"}) std::remove((file + end).c_str());
  {  // local ranks by hand, dealt out in turn over two hosts: no rank's number tells the first of its host
    Together ranks;
    const int port = lockstep_test::free_port();
    for (int rank = 0; rank < 4; ++rank) {
      auto variables = by_hand(rank, 4, port);
      variables.insert({{"LOCAL_RANK", std::to_string(rank / 2)}, {"LOCAL_WORLD_SIZE", "2"}});
      ranks.add({program, "first twice", file}, variables);
    }
    CHECK(ranks.wait(30s) == std::vector<int>{0, 0, 0, 0});
  }
  for (const char* end : {"0", "1"}) std::remove((file + end).c_str());
  {
    Together ranks({program, "first is killed"}, 3);
    CHECK(ranks.wait() == std::vector<int>{128 + SIGKILL, 1, 1});
    for (int rank : {1, 2}) {
      INFO(ranks[rank].error());
      CHECK_THAT(ranks[rank].error(), ContainsSubstring("rank 0, the first on this host"));
      CHECK(ranks[rank].error().find("c10") == std::string::npos);
    }
  }
}

TEST_CASE("each rank gets the program's own arguments") {
  const auto result = run({program, "arguments", "--nproc=2", "--epochs", "3", "--timeout", "60", "a b"});
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  for (int rank : {0, 1})
    CHECK(count(result.out, fmt::format("[rank {}] arguments 'arguments' '--epochs' '3' 'a b'\n", rank)) ==
          1);
}

TEST_CASE("processes that give World::join one URL become one run", "[.release]") {
  const auto url = fmt::format("tcp://localhost:{}", lockstep_test::free_port());
  Together ranks;
  for (int rank : {0, 1, 2}) ranks.add({program, "joins", url, std::to_string(rank), "3"}, {});
  CHECK(ranks.wait() == std::vector<int>{0, 0, 0});
  for (int rank : {0, 1, 2}) {
    INFO(ranks[rank].error());
    CHECK(ranks[rank].out() == fmt::format("local {} of 3\n", rank));
  }
}

TEST_CASE("an error at the URL of World::join names the call") {
  using namespace lockstep::detail;
  const auto joins = [](int port, const char* rank) {
    auto result = run({program, "joins", fmt::format("tcp://127.0.0.1:{}", port), rank, "2"});
    INFO(result.out << result.error);
    CHECK(result.code == 1);
    CHECK(count(result.error, "\n") == 1);
    return result.error;
  };
  const StoreServer other(listen_on("127.0.0.1", 0), "of another run");
  CHECK_THAT(joins(other.port(), "0"),
             ContainsSubstring(fmt::format("port {} is already in use", other.port())) &&
                 ContainsSubstring("give World::join a free one on every rank"));
  CHECK_THAT(
      joins(other.port(), "1"),
      ContainsSubstring(fmt::format(
          "the store at 127.0.0.1:{} (the URL given to World::join) belongs to another run", other.port())));
}

TEST_CASE("each rank gets its share of the cores") {
  const auto result = run({program, "threads", "--nproc", "2"}, {{"OMP_NUM_THREADS", ""}});
  CHECK(count(result.out, fmt::format("threads {}\n", std::max(1, lockstep::detail::usable_cores() / 2))) ==
        2);
  CHECK(count(run({program, "threads", "--nproc", "2"}, {{"OMP_NUM_THREADS", "2"}}).out, "threads 2\n") == 2);
  CHECK(count(run({program, "threads", "--nproc", "2", "--threads", "3"}, {{"OMP_NUM_THREADS", "2"}}).out,
              "threads 3\n") == 2);
  CHECK_THAT(run({program, "threads", "--threads", "none"}).error,
             ContainsSubstring("--threads none is not a number"));
}

TEST_CASE("a World without launch leaves the process as it was") {
  Together ranks({program, "untouched"}, 2);
  CHECK(ranks.wait() == std::vector<int>{0, 0});
  for (const auto& process : ranks.all) {
    INFO(process->error());
    CHECK(process->out() == "threads 3\n");
  }
}

TEST_CASE("progress is a bar on a terminal and lines elsewhere") {
  const auto plain = run({program, "progress", "--nproc", "2"});
  INFO(plain.out << plain.error);
  CHECK(plain.code == 0);
  CHECK(count(plain.out, "\r") == 0);
  CHECK(count(plain.out, "epoch 1/1: ") >= 3);
  CHECK_THAT(plain.out, ContainsSubstring("epoch 1/1: 50/50, "));
  CHECK_THAT(plain.out, ContainsSubstring(" samples/s, loss 0.0200, 0:0"));
  CHECK_THAT(plain.out, ContainsSubstring(" in all\n"));
  CHECK(count(plain.out, "[rank 1] half way\n") == 1);
  CHECK(plain.out.ends_with("done\n"));

  for (const char* nproc : {"1", "2"}) {
    auto bar = start({program, "progress", "--nproc", nproc}, {}, {.terminal = true});
    REQUIRE(bar.wait(30s));
    INFO(bar.out());
    CHECK(count(bar.out(), "\r") > 5);
    CHECK_THAT(bar.out(), ContainsSubstring("epoch 1/1 100 % [#################################] 50/50, "));
    if (nproc == std::string("2")) CHECK_THAT(bar.out(), ContainsSubstring("\r\x1b[K[rank 1] half way\r\n"));
    CHECK(bar.out().ends_with("\r\r\ndone\r\n"));
  }
}

}  // namespace launch_fault_test
