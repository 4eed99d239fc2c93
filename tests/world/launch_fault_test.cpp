#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/store_server.hpp"
#include "support/by_hand.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/reported.hpp"
#include "support/store_news.hpp"
#include "support/temporary_folder.hpp"

namespace launch_fault_test {

using namespace std::chrono_literals;
using lockstep::FailureKind;
using namespace lockstep_test;
using Strings = std::vector<std::string>;

namespace {

const std::string program = test_program("world_program");

// A connection that says nothing, once somebody listens.
lockstep::detail::Descriptor connect_to(int port) {
  lockstep::detail::Descriptor fd;
  lockstep::detail::connect_to(
      {"127.0.0.1", port}, 20s, [](const std::string&) {},
      [&](lockstep::detail::Descriptor connected, auto) {
        fd = std::move(connected);
        return std::string();
      });
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
  CHECK(result.about_run == fmt::format("lockstep: 3 ranks on 1 host ({}: 3), started by --nproc; threads "
                                        "per rank: {}, from its share of the cores\n",
                                        host_name(), share_of_cores(3)));
  CHECK(result.error.empty());
  CHECK(run({program, "well", "--nproc", "3"}, {{"LOCKSTEP_LOG_LEVEL", "warning"}}).about_run.empty());
}

TEST_CASE("without --nproc and GPUs there is one rank") {
  CHECK(count(run({program, "well"}, {{"CUDA_VISIBLE_DEVICES", "-1"}}).out, "rank 0 of 1") == 1);
}

TEST_CASE("bad input ends on one line with exit code 2, before anything starts") {
  struct Case {
    Strings arguments;
    Variables variables;
    std::string text;
  };
  for (const auto& [arguments, variables, text] : std::vector<Case>{
           {{"well", "--nproc", "0"}, {}, "--nproc 0"},
           {{"well", "--nproc", "2"}, {{"WORLD_SIZE", "3"}}, "WORLD_SIZE=3 contradicts --nproc 2"},
           {{"well"}, by_hand(2, 2, 29999), "RANK=2 is out of range"},
           {{"well"}, {{"OMPI_COMM_WORLD_SIZE", "2"}}, "OMPI_COMM_WORLD_SIZE=2 is set but"},
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
    std::string mode, message;
    int rank;
  };
  for (const auto& [mode, message, rank] : std::vector<Case>{
           {"torch throws", "c10::Error: a tensor of LibTorch is wrong", 1},
           {"first fails", "the archive is damaged", 0},
           {"first takes long",  // for both of the others
            "rank 0, the first on this host, has not finished its local_zero_first after 0.5 s", -1},
           {"collective in scope",
            "barrier called inside a rank-zero scope: the other ranks are not in it and would never answer. "
            "Call it outside, on every rank",
            0}}) {
    const auto result = run({program, mode, "--nproc", "3"}, {}, 25s);  // the others would wait longer
    INFO(mode << "\n" << result.out << result.error);
    const Reported said = reported(result.error);
    CHECK(result.code == 1);
    CHECK(said.alone);
    CHECK(said.failure.message == message);
    CHECK((rank < 0 ? said.failure.rank > 0 : said.failure.rank == rank));
    CHECK(result.left == 0);
  }
}

TEST_CASE("after a failure launch starts all ranks again, as often as it is told") {
  const std::string fails = "fails before restart";
  for (const std::string nproc : {"3", "1"}) {
    const auto result = run({program, fails, "2", "--nproc", nproc, "--max-restarts", "2"});
    INFO(result.out << result.error);
    CHECK(result.code == 0);
    CHECK(count(result.out, " local ") == std::stoi(nproc));
    CHECK(count(result.error, "died (SIGKILL, perhaps for lack of memory)\n") == 2);
    for (const int restart : {1, 2})
      CHECK(count(result.error,
                  fmt::format("lockstep: restart {} of 2: starts all ranks again\n", restart)) == 1);
    CHECK(result.left == 0);
  }
  const auto given_up = run({program, fails, "2", "--nproc", "2", "--max-restarts=1"});
  INFO(given_up.error);
  CHECK(given_up.code == 128 + SIGKILL);
  CHECK(given_up.error.ends_with(
      " died (SIGKILL, perhaps for lack of memory)\nlockstep: gives up after restart 1 of 1\n"));
  CHECK(count(run({program, fails, "1", "--nproc", "2"}).error, "\n") == 1);
}

TEST_CASE("what another start cannot mend is not tried again") {
  const auto result = run({program, "usage after meeting", "--nproc", "2", "--max-restarts", "3"});
  INFO(result.error);
  CHECK(result.code == 2);
  CHECK(count(result.error, "\n") == 1);
}

TEST_CASE("a run that was asked to end is not started again, however its ranks end") {
  auto launched = start({program, "crashes when it must end", "--nproc", "2", "--max-restarts", "3"});
  REQUIRE(launched.wait_for_output("rank 1 of 2"));
  launched.signal(SIGTERM);
  REQUIRE(launched.wait(20s));
  INFO(launched.error());
  CHECK(launched.exit_code() == 128 + SIGABRT);
  CHECK(count(launched.error(), "restart") == 0);
}

TEST_CASE("launchers of two hosts start all ranks again together") {
  struct Case {
    std::string mode;
    bool well = false;  // of the second host's ranks
  };
  for (const auto& [mode, well] : std::vector<Case>{{"fails before restart"},
                                                    {"throws before restart"},
                                                    {"first host fails before restart", true},
                                                    {"first returns before restart", true},
                                                    {"last returns before restart"}}) {
    const int port = free_port();
    Together launchers;
    for (int rank : {0, 2}) {
      auto variables = by_hand(rank, 4, port);
      variables["MASTER_ADDR"] = host_name();
      launchers.add({program, mode, "2", "--nproc", "2", "--max-restarts", "2"}, variables);
    }
    CHECK(launchers.wait(60s) == std::vector<int>{0, 0});
    for (const auto& launcher : launchers.all) {
      INFO(mode << '\n' << launcher->out() << launcher->error());
      CHECK(count(launcher->out(), " of 4, local ") == 2);
      CHECK(count(launcher->error(), "lockstep: restart ") == 2);
    }
    CHECK(count(launchers[1].error(), "error: ") == (well ? 0 : 2));
    CHECK(processes_left(launchers.marker) == 0);
  }
}

TEST_CASE("a host that is stopped is not waited for by restarts, nor one that starts no rank again",
          "[.release]") {
  for (const std::string mode : {"waits for failure", "answers by a code", "has no time to end", "killed"}) {
    const bool interrupted = mode != "killed";
    const int port = free_port();
    Together launchers;
    for (int rank : {0, 2}) {
      auto variables = by_hand(rank, 4, port);
      variables["MASTER_ADDR"] = host_name();
      const auto most = interrupted || rank == 2 ? "3" : "0";
      launchers.add({program, mode, "--nproc", "2", "--max-restarts", most}, variables);
    }
    for (auto& launcher : launchers.all) REQUIRE(launcher->wait_for_output(" of 4, local ", 20s));
    if (interrupted) launchers[1].signal(SIGTERM);
    if (mode == "has no time to end") {
      std::this_thread::sleep_for(200ms);  // else the system makes one signal of two
      launchers[1].signal(SIGTERM);
    }
    const auto codes = launchers.wait(40s);
    INFO(launchers[0].error() << launchers[1].error());
    const int second = mode == "killed" ? 128 + SIGKILL : mode == "answers by a code" ? 7 : 128 + SIGTERM;
    CHECK(codes == std::vector<int>{1, second});
    CHECK(count(launchers[0].error() + launchers[1].error(), "restart ") == 0);
    CHECK(count(launchers[1].error(), "the first host has not started its ranks again") ==
          (interrupted ? 0 : 1));
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

TEST_CASE("ranks by hand meet, and the host of the store leaves last") {
  for (const char* mode : {"well", "late"}) {
    Together ranks({program, mode}, 3);
    CHECK(ranks.wait() == std::vector<int>{0, 0, 0});
    for (const auto& process : ranks.all) CHECK(process->error().empty());
  }
}

TEST_CASE("without a launcher the headline names the culprit, not who noticed") {
  Together ranks({program, "throws"}, 3);
  CHECK(ranks.wait() == std::vector<int>{1, 1, 1});
  for (const int rank : {0, 1, 2}) {
    const Reported said = reported(ranks[rank].error());
    INFO(ranks[rank].error());
    CHECK(said.alone);
    CHECK(said.failure.rank == 1);
    CHECK(said.failure.message == "std::out_of_range: no such digit");
    CHECK(said.noticed_by == (rank == 1 ? -1 : rank));
  }
  CHECK(processes_left(ranks.marker) == 0);
}

TEST_CASE("SIGTERM of a rank, or of a host, is told to the others as such") {
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
        INFO(ranks[other].error());
        const Reported said = reported(ranks[other].error());
        CHECK(said.alone);
        CHECK(said.failure.kind == FailureKind::died);
        CHECK(said.failure.rank == culprit);
        CHECK(said.failure.code == 128 + number);
        CHECK(said.failure.host == host_name());
        CHECK(said.noticed_by == other);
      }
  }
  Together hosts;
  const int port = free_port();
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
  const Reported said = reported(hosts[0].error());
  CHECK(said.failure.rank >= 2);
  CHECK(said.failure.code == 128 + SIGTERM);
  CHECK(said.failure.host == host_name());
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

TEST_CASE("a port in use is named") {
  const TakenPort taken;
  for (const Strings& command : {Strings{program, "well"}, Strings{program, "well", "--nproc", "2"}}) {
    const auto result = run(command, by_hand(0, 3, taken.number()), 20s);
    INFO(result.error);
    CHECK(result.code == 1);
    CHECK(result.error.ends_with(
        fmt::format("port {0} is already in use on this host (`ss -ltnp 'sport = :{0}'` shows by whom): use "
                    "a free one on every rank (MASTER_PORT, or the URL of World::join)\n",
                    taken.number())));
    CHECK(count(result.error, "\n") == 1);
  }
}

TEST_CASE("a master that is not there is told apart from a name that is not known") {
  auto variables = by_hand(1, 2, free_port());
  variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "1";
  auto result = run({program, "well"}, variables, 20s);
  CHECK(result.code == 1);
  CHECK(result.error ==
        fmt::format("error: rank 1 failed: no store at 127.0.0.1:{0} (MASTER_ADDR=127.0.0.1, "
                    "MASTER_PORT={0}) after 1 s: it refuses the connection: nothing listens there. Start "
                    "rank 0 on that host, or correct the address on every rank\n",
                    variables["MASTER_PORT"]));
  variables["MASTER_ADDR"] = "no-such-host.invalid";
  for (const char* rank : {"0", "1"}) {
    variables["RANK"] = rank;
    result = run({program, "well"}, variables, 20s);  // 7 s where no name server answers
    INFO(result.error);
    CHECK(result.code == 1);
    CHECK(reported(result.error)
              .failure.message.starts_with(
                  fmt::format("the name 'no-such-host.invalid' of the master host "
                              "(MASTER_ADDR=no-such-host.invalid, MASTER_PORT={}) cannot be resolved on {} (",
                              variables["MASTER_PORT"], host_name())));
  }
}

TEST_CASE("two processes that claim one rank are both named, to every rank") {
  for (const int rank : {1, 0}) {
    CAPTURE(rank);
    const auto begin = std::chrono::steady_clock::now();
    Together ranks;
    const int port = free_port();
    for (int claim = 0; claim < 2; ++claim) ranks.add({program, "waits"}, by_hand(rank, 3, port));
    if (rank == 1) ranks.add({program, "well"}, by_hand(0, 3, port));
    CHECK(ranks.wait() == std::vector<int>(ranks.all.size(), 1));
    const auto claimed = [&](int first, int second) {
      return fmt::format(
          "rank {0} is claimed by {1} pid {2} and {1} pid {3}, the latter with RANK={0}: give every process "
          "its own RANK, and every run a MASTER_PORT of its own\n",
          rank, host_name(), ranks[first].pid(), ranks[second].pid());
    };
    for (const auto& process : ranks.all) {  // whichever came first
      INFO(process->error());
      CHECK(count(process->error(), claimed(0, 1)) + count(process->error(), claimed(1, 0)) == 1);
      CHECK(count(process->error(), "\n") == 1);
    }
    CHECK(std::chrono::steady_clock::now() - begin < 10s);
  }
  Together hosts;
  const int port = free_port();
  for (int claim = 0; claim < 2; ++claim) hosts.add({program, "waits", "--nproc", "2"}, by_hand(0, 4, port));
  CHECK(hosts.wait() == std::vector<int>{1, 1});
  for (const auto& process : hosts.all)
    CHECK(
        process->error().ends_with(", the latter with RANK=0 and --nproc 2: give every command its own RANK, "
                                   "the first of its ranks, and every run a MASTER_PORT of its own\n"));
  CHECK(processes_left(hosts.marker) == 0);
}

TEST_CASE("ranks that disagree on the world size are all told so") {
  Together ranks;
  const int port = free_port();
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
  const int port = free_port();
  hosts.add({program, "waits", "--nproc", "2"}, by_hand(0, 2, port));
  for (int rank = 0; rank < 2; ++rank) REQUIRE(hosts[0].wait_for_output(fmt::format("rank {} of 2", rank)));
  hosts.add({program, "well", "--nproc", "2"}, by_hand(2, 4, port));
  CHECK(hosts[1].wait(10s));
  CHECK(hosts[1].exit_code() == 1);
  INFO(hosts[1].error());
  CHECK(hosts[1].error().ends_with(" says 2. Start all of them with one WORLD_SIZE\n"));
  // Another command for the same ranks.
  hosts.add({program, "well", "--nproc", "2"}, by_hand(0, 2, port));
  CHECK(hosts[2].wait(10s));
  CHECK(hosts[2].exit_code() == 1);
  CHECK(!hosts[0].wait(1s));  // neither ends the run
  hosts[0].signal(SIGTERM);
  CHECK(hosts[0].wait(20s));
  CHECK(hosts[0].error().empty());
}

TEST_CASE("a process alone opens no port and looks up no name") {
  const TakenPort taken;
  for (const char* address : {"127.0.0.1", "no-such-host.invalid"})
    for (const bool by_flag : {true, false}) {
      CAPTURE(address, by_flag);
      Variables variables{{"MASTER_ADDR", address}, {"MASTER_PORT", std::to_string(taken.number())}};
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
  const auto host = host_name();
  const auto ranks_with = [](const std::vector<Variables>& places) {
    auto ranks = std::make_unique<Together>();
    const int port = free_port();
    for (std::size_t rank = 0; rank < places.size(); ++rank) {
      auto variables = by_hand(static_cast<int>(rank), static_cast<int>(places.size()), port);
      variables.insert(places[rank].begin(), places[rank].end());
      if (variables.count("SLURM_PROCID") > 0) variables.erase("RANK");
      ranks->add({program, "well"}, variables);
    }
    return ranks;
  };
  const auto by_local = [](const char* rank, const char* size) {
    return Variables{{"LOCAL_RANK", rank}, {"LOCAL_WORLD_SIZE", size}};
  };
  const auto by_slurm = [](const char* rank) {
    return Variables{{"SLURM_JOB_ID", "7"},
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
    const int port = free_port();
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
        CHECK(ranks[rank].error().ends_with(
            fmt::format(": LOCAL_RANK=0 of rank 1 contradicts the other ranks on {}, among which it is "
                        "number 1: set LOCAL_WORLD_SIZE too if that is meant, or unset LOCAL_RANK\n",
                        host_name())));
    }
  }
}

TEST_CASE("two steps of a job that get one port do not become one run") {
  const auto task = [](const char* step, const char* rank) {
    return Variables{{"SLURM_JOB_ID", "912"},
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
  CHECK(reported(ranks[1].error())
            .failure.message.starts_with("the store at localhost:61885 (SLURM_STEP_NODELIST=localhost, "
                                         "a port derived from the job) belongs to another run"));
  ranks.add({program, "well"}, task("4", "1"));
  CHECK(ranks.wait() == std::vector<int>{0, 1, 0});
}

TEST_CASE("rank 0 warns of ranks that run another program than it does, once") {
  const TemporaryFolder folder;
  const std::string other = folder / "other", same = folder / "same";
  for (const auto& copy : {other, same}) std::filesystem::copy_file(program, copy);
  std::ofstream(other, std::ios::app) << "x";
  const auto errors = [](const std::string& second) {
    Together ranks;
    const int port = free_port();
    ranks.add({program, "well"}, by_hand(0, 2, port));
    ranks.add({second, "well"}, by_hand(1, 2, port));
    CHECK(ranks.wait() == std::vector<int>{0, 0});
    return ranks[0].error() + ranks[1].error();
  };
  const auto warning = errors(other);
  INFO(warning);
  CHECK(count(warning, "warning: the ranks run different programs: world_program ") == 1);
  CHECK(count(warning, " on rank 0, other ") == 1);
  CHECK(warning.ends_with(" on rank 1; build and copy one to every host\n"));
  CHECK(errors(same).empty());
}

TEST_CASE("under a launcher that lockstep does not know a program sets torchrun's variables itself") {
  Together ranks;
  const int port = free_port();
  for (const char* rank : {"0", "1"})
    ranks.add({program, "unknown launcher"}, {{"MADE_UP_RANK", rank},
                                              {"MADE_UP_SIZE", "2"},
                                              {"MADE_UP_PORT", std::to_string(port)},
                                              {"OMP_NUM_THREADS", "1"}});
  CHECK(ranks.wait() == std::vector<int>{0, 0});
  for (int rank : {0, 1})
    CHECK(ranks[rank].out() == fmt::format("[rank {0}] rank {0} of 2, local {0} of 2\n", rank));
  CHECK(ranks[0].about_run() ==
        fmt::format("lockstep: 2 ranks on 1 host ({}: 2), started by hand (RANK, WORLD_SIZE), rendezvous at "
                    "tcp://127.0.0.1:{}; threads per rank: 1, from OMP_NUM_THREADS\n",
                    host_name(), port));
  CHECK(ranks[1].about_run().empty());
}

TEST_CASE("a launcher's single rank writes the line about the run, a process alone does not") {
  const auto error = [](const Variables& variables) {
    return run({program, "well", "--nproc", "1"}, variables, 20s).error;
  };
  const Variables one{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}, {"OMP_NUM_THREADS", "1"}};
  CHECK(
      error(one) ==
      fmt::format("lockstep: 1 rank on 1 host ({}: 1), started by mpirun of Open MPI (OMPI_COMM_WORLD_RANK, "
                  "OMPI_COMM_WORLD_SIZE); threads per rank: 1, from OMP_NUM_THREADS\n",
                  host_name()));
  auto quiet = one;
  quiet["LOCKSTEP_LOG_LEVEL"] = "warning";
  CHECK(error(quiet).empty());
  CHECK(error({}).empty());
}

TEST_CASE("a rank that does not come is named while it is waited for, and at the end", "[.release]") {
  const int port = free_port();
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
      host_name());
  CHECK(ranks[0].wait_for_output("waiting for rank 2 of 3; " + doubt + "; gives up in "));
  CHECK(ranks.wait(60s) == std::vector<int>{1, 1});
  for (const auto& process : ranks.all)
    CHECK(reported(process->error()).failure.message.starts_with("rank 2 of 3 did not join within 13 s: "));
}

TEST_CASE("a store that does not answer while ranks are waited for ends none of them", "[.release]") {
  const int port = free_port();
  Together ranks;
  for (int rank : {0, 1}) ranks.add({program, "well"}, by_hand(rank, 3, port));
  connect_to(port);                 // rank 0 listens
  std::this_thread::sleep_for(3s);  // in which rank 1 joins
  ranks[0].signal(SIGSTOP);
  CHECK(ranks[1].wait_for_output("waiting for the store of the run, which does not answer; gives up in "));
  ranks[0].signal(SIGCONT);
  ranks.add({program, "well"}, by_hand(2, 3, port));
  CHECK(ranks.wait(60s) == std::vector<int>{0, 0, 0});
}

TEST_CASE("launchers of two hosts end with ranks that exit before they join") {
  const int port = free_port();
  Together launchers;
  for (int rank : {0, 2}) {
    auto variables = by_hand(rank, 4, port);
    variables["MASTER_ADDR"] = host_name();
    launchers.add({program, "exits well before meeting", "--nproc", "2"}, variables);
  }
  CHECK(launchers.wait(20s) == std::vector<int>{0, 0});
}

TEST_CASE("a rank that works before it comes is not waited for aloud, and one that sleeps is", "[.release]") {
  for (const std::string does : {"works", "sleeps"}) {
    const auto result =
        run({program, does + " before it joins", "--nproc", "2"}, {{"OMP_NUM_THREADS", "1"}}, 60s);
    CAPTURE(result.error);
    CHECK(result.code == 0);
    CHECK(count(result.error, "waiting for rank 1 of 2; gives up in ") == (does == "works" ? 0 : 1));
  }
}

TEST_CASE(
    "ranks end once their launcher, which holds back their output, has been stopped for the heartbeat "
    "timeout") {
  Process launcher({program, "never communicates", "--nproc", "2"},
                   {{"OMP_NUM_THREADS", "1"}, {"LOCKSTEP_HEARTBEAT_TIMEOUT", "1"}}, {});
  REQUIRE(launcher.wait_for_output("now"));
  launcher.signal(SIGSTOP);
  // Its ranks stay zombies until it goes on.
  const auto until = std::chrono::steady_clock::now() + 20s;
  while (zombies_of(launcher.pid()) < 2 && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(50ms);
  CHECK(zombies_of(launcher.pid()) == 2);
  launcher.signal(SIGCONT);
  REQUIRE(launcher.wait(20s));
  CHECK(launcher.exit_code() == 1);
  CAPTURE(launcher.error());
  CHECK(reported(launcher.error())
            .failure.message.starts_with(
                fmt::format("its launcher (pid {}) has been stopped for ", launcher.pid())));
  CHECK(processes_left(launcher.marker()) == 0);
}

TEST_CASE("a rank that fails before all have joined ends those that wait for it") {
  Together ranks;
  const int port = free_port();
  ranks.add({program, "well"}, by_hand(0, 3, port));
  ranks.add({program, "well"}, by_hand(1, 3, port));
  connect_to(port);  // rank 0 listens
  ranks.add({program, "usage"}, by_hand(2, 3, port));
  CHECK(ranks.wait() == std::vector<int>{1, 1, 2});
  for (int rank : {0, 1}) {
    CHECK(reported(ranks[rank].error()).failure.rank == 2);
    CHECK(reported(ranks[rank].error()).noticed_by == rank);
  }
}

TEST_CASE("a rank that ends with a code before it has met the others ends those that wait for it") {
  for (const std::string mode : {"code before meeting", "exit before meeting"}) {
    const auto begin = std::chrono::steady_clock::now();
    Together ranks({program, mode}, 3);
    CHECK(ranks.wait() == std::vector<int>{1, 5, 1});
    CHECK(std::chrono::steady_clock::now() - begin < 10s);
    for (int rank : {0, 2}) {
      INFO(mode << "\n" << ranks[rank].error());
      const Reported said = reported(ranks[rank].error());
      CHECK(said.failure.rank == 1);
      CHECK(said.failure.code == 5);
      CHECK(said.noticed_by == rank);
    }
  }
}

TEST_CASE("a rank that is killed while it waits for others ends those that wait with it", "[.release]") {
  {
    Together ranks;
    const int port = free_port();
    for (int rank : {0, 1}) ranks.add({program, "well"}, by_hand(rank, 3, port));
    await_sign_in(port, {0, 1});
    ranks[1].signal(SIGKILL);
    CHECK(ranks[0].wait(8s));
    CHECK(ranks[0].exit_code() == 1);
    CHECK(ranks[0].error() ==
          fmt::format(
              "error: rank 1 has ended before its first communicator ({} pid {}): it was killed, or its "
              "connection broke; look at its output, and start all ranks again; noticed by rank 0\n",
              host_name(), ranks[1].pid()));
  }
  // The whole launching process of a host: nobody is left who could report it.
  Together hosts;
  const int port = free_port();
  hosts.add({program, "well"}, by_hand(0, 4, port));
  hosts.add({program, "well", "--nproc", "2"}, by_hand(1, 4, port));
  await_sign_in(port, {0, 1, 2});
  hosts[1].signal(SIGKILL);
  CHECK(hosts[0].wait(8s));
  CHECK(hosts[0].exit_code() == 1);
  CHECK(reported(hosts[0].error()).failure.kind == FailureKind::died);
  // A launcher that is left names the signal.
  Together watched;
  const int other_port = free_port();
  watched.add({program, "well"}, by_hand(0, 4, other_port));
  watched.add({program, "well", "--nproc", "2"}, by_hand(1, 4, other_port));
  await_sign_in(other_port, {0, 1, 2});
  for (const pid_t process : processes_with(watched.marker))
    if (process_state(process).parent == watched[1].pid()) {
      kill(process, SIGKILL);
      break;
    }
  CHECK(watched[0].wait(8s));
  INFO(watched[0].error());
  CHECK(reported(watched[0].error()).failure.code == 128 + SIGKILL);
}

TEST_CASE("a rank that is started again in place of a killed one is told that it cannot replace it") {
  using namespace lockstep::detail;
  const StoreServer server(listen_on("127.0.0.1", 0), "", lockstep::detail::hello_timeout, 10min);
  // The store of a run whose rank 1 has joined and was killed.
  StoreConnection other({"127.0.0.1", server.port()}, 20s);
  {
    StoreConnection rank({"127.0.0.1", server.port()}, 20s);
    rank.request(StoreOperation::join, StoreConnection::Clock::now() + 20s, nullptr, 1, 3,
                 RankIdentity{"nodeB pid 811", "nodeB"}, true);
  }
  while (!RunClient(other, 20s).members({1}).at(0).lost) std::this_thread::sleep_for(10ms);
  Together ranks;
  ranks.add({program, "well"}, by_hand(1, 3, server.port()));
  CHECK(ranks.wait() == std::vector<int>{1});
  CHECK(ranks[0].error() == fmt::format("error: rank 1 failed: rank 1 has ended (nodeB pid 811), and {} pid "
                                        "{} cannot take its place: start all ranks again\n",
                                        lockstep_test::host_name(), ranks[0].pid()));
}

TEST_CASE("a world of very many ranks gives up in time, and names some that are missing", "[.release]") {
  auto variables = by_hand(0, 1'000'000, free_port());
  variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "6";
  const auto begin = std::chrono::steady_clock::now();
  const auto result = run({program, "well"}, variables, 100s);
  CHECK(std::chrono::steady_clock::now() - begin < 13s);
  CHECK(result.code == 1);
  INFO(result.error);
  CHECK(reported(result.error)
            .failure.message.starts_with(
                "ranks 1, 2, 3, 4 and 999995 more of 1000000 did not join within 6 s"));
}

TEST_CASE("rank 0 on another host than MASTER_ADDR names is told, and so are the ranks of its launcher") {
  const auto [ranks, late] = GENERATE(table<int, std::string>({{1, "rank 1 of 2"}, {2, "rank 2 of 3"}}));
  auto variables = by_hand(0, ranks + 1, free_port());
  variables["MASTER_ADDR"] = "192.0.2.1";  // an address for examples: nobody's
  variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "1";
  const auto result = run({program, "well", "--nproc", std::to_string(ranks)}, variables, 30s);
  INFO(result.error);
  CHECK(result.code == 1);
  CHECK_THAT(result.error,
             ContainsSubstring(fmt::format(
                 " failed: {} did not join within 1 s: start it with the MASTER_ADDR, MASTER_PORT "
                 "and WORLD_SIZE of the others; MASTER_ADDR=192.0.2.1 is no address of this host "
                 "({}): rank 0 must run on the host that it names\n",
                 late, host_name())));
}

TEST_CASE("an agent of torchrun that nobody finds is told with its variables, first while it is waited for",
          "[.release]") {
  const int port = free_port();
  auto variables = by_hand(0, 2, port);
  variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "6";
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  auto process = start({program, "well"}, variables);
  const auto begin = std::chrono::steady_clock::now();
  const auto where = fmt::format("127.0.0.1:{0} (MASTER_ADDR=127.0.0.1, MASTER_PORT={0})", port);
  REQUIRE(
      process.wait_for_output(fmt::format("warning: waiting for the store of torchrun's agent at {}: it "
                                          "refuses the connection: nothing listens there; gives up in ",
                                          where)));
  CHECK(std::chrono::steady_clock::now() - begin < 10s);
  REQUIRE(process.wait(20s));
  CHECK(process.exit_code() == 1);
  CHECK(process.error().ends_with(
      fmt::format("error: rank 0 failed: no store at {} after 6 s: it refuses the connection: nothing "
                  "listens there. torchrun's agent hosts it: look at the output of torchrun and start it "
                  "again, or unset TORCHELASTIC_USE_AGENT_STORE if torchrun has not started this process\n",
                  where)));
}

TEST_CASE("a listener on MASTER_PORT that never answers is told within the rendezvous timeout",
          "[.release]") {
  const TakenPort mute;
  auto variables = by_hand(1, 2, mute.number());
  variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "1";
  for (const bool agent : {false, true}) {
    if (agent) variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
    const auto result = run({program, "well"}, variables, 30s);
    INFO(result.error);
    CHECK(result.code == 1);
    CHECK_THAT(result.error,
               ContainsSubstring(
                   agent ? fmt::format("the store of torchrun's agent at 127.0.0.1:{0} "
                                       "(MASTER_ADDR=127.0.0.1, MASTER_PORT={0}) does not answer after 1 s: "
                                       "look at the output of torchrun on that host, and start it again\n",
                                       mute.number())
                         : "something listens there, but does not answer"));
    CHECK(count(result.error, "\n") == 1);
  }
}

TEST_CASE("a stranger's byte on the port of the store holds up neither the ranks nor the end") {
  using namespace lockstep::detail;
  const int port = free_port();
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
  auto variables = by_hand(0, 2, free_port());
  const int port = std::stoi(variables["MASTER_PORT"]);
  variables["LOCKSTEP_STORE_SECRET"] = "of this run";
  Together ranks;
  ranks.add({program, "well"}, variables);
  CHECK_THROWS_AS(StoreConnection({"127.0.0.1", port}, 20s), lockstep::RendezvousError);
  variables["RANK"] = "1";
  ranks.add({program, "well"}, variables);
  CHECK(ranks.wait() == std::vector<int>{0, 0});
}

TEST_CASE("a failure's text cannot drive the terminal of another rank") {
  Together ranks({program, "throws controls"}, 2);
  CHECK(ranks.wait() == std::vector<int>{1, 1});
  INFO(ranks[0].error());
  CHECK(reported(ranks[0].error()).alone);
  CHECK(reported(ranks[0].error()).failure.message == "a bad \\x1b[2Jfile\\nerror: rank 7 failed");
}

TEST_CASE("without a launcher one rank of a host works first in local_zero_first, each time", "[.release]") {
  const auto file = fmt::format("/tmp/lockstep_first_{}", new_marker());
  {
    Together ranks({program, "first twice", file}, 3);
    CHECK(ranks.wait() == std::vector<int>{0, 0, 0});
    for (int rank : {0, 1, 2}) {
      INFO(ranks[rank].error());
      CHECK(ranks[rank].out() == fmt::format("[rank {0}] local {0} of 3, order kept\n", rank));
    }
  }
  for (const char* end : {"0", "1"}) std::remove((file + end).c_str());
  {  // local ranks by hand, dealt out in turn over two hosts: no rank's number tells the first of its host
    Together ranks;
    const int port = free_port();
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
      CHECK_THAT(ranks[rank].error(), ContainsSubstring("rank 0, the first on this host, has "));
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
  const auto url = fmt::format("tcp://localhost:{}", free_port());
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
  CHECK(joins(other.port(), "0")
            .ends_with("use a free one on every rank (MASTER_PORT, or the URL of World::join)\n"));
  CHECK(joins(other.port(), "1")
            .starts_with(fmt::format(
                "error: the store at 127.0.0.1:{} (the URL given to World::join) belongs to another run",
                other.port())));
}

TEST_CASE("each rank gets its share of the cores") {
  const auto result = run({program, "threads", "--nproc", "2"}, {{"OMP_NUM_THREADS", ""}});
  CHECK(count(result.out, fmt::format("threads {}\n", share_of_cores(2))) == 2);
  CHECK(count(run({program, "threads", "--nproc", "2"}, {{"OMP_NUM_THREADS", "2"}}).out, "threads 2\n") == 2);
  CHECK(count(run({program, "threads", "--nproc", "2", "--threads", "3"}, {{"OMP_NUM_THREADS", "2"}}).out,
              "threads 3\n") == 2);
}

TEST_CASE("GPUs and timeout of launch reach a rank in its environment, one process or several") {
  for (const char* nproc : {"1", "2"})
    CHECK(
        count(run({program, "variables", "--nproc", nproc, "--timeout", "90"}, {{"CUDA_VISIBLE_DEVICES", ""}})
                  .out,
              "GPUs 2,0, timeout 90\n") == std::stoi(nproc));
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
  CHECK(count(plain.out, "[rank 1] half way\n") == 1);
  CHECK(plain.out.ends_with("done\n"));

  for (const char* nproc : {"1", "2"}) {
    auto bar = start({program, "progress", "--nproc", nproc}, {}, {.terminal = true});
    REQUIRE(bar.wait(30s));
    INFO(bar.out());
    CHECK(count(bar.out(), "\r") > 5);
    if (nproc == std::string("2")) CHECK(count(bar.out(), "\r\x1b[K[rank 1] half way\r\n") == 1);
    CHECK(bar.out().ends_with("\r\r\ndone\r\n"));
  }
}

}  // namespace launch_fault_test
