#include "lockstep/world/detail/supervisor.hpp"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/detail/at_most.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/reported.hpp"
#include "world/child_mode.hpp"

using namespace std::chrono_literals;
using namespace lockstep_test;

namespace {

// What a launching process passes on to its ranks.
constexpr int forwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

// Leaves nothing for any allocation of this process.
void use_up_memory() {
  rlim_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t bytes = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
  const rlimit limit{bytes, bytes};
  setrlimit(RLIMIT_AS, &limit);
  for (std::size_t size = 1 << 20; size >= 16; size -= size > 4096 ? size / 2 : 16)
    while (volatile void* block = std::malloc(size)) (void)block;
}

#ifdef __SANITIZE_THREAD__
// Returns whether a thread blocks this signal, as the thread of ThreadSanitizer's runtime does.
bool blocks(pid_t pid, pid_t thread, int number) {
  std::ifstream status(fmt::format("/proc/{}/task/{}/status", pid, thread));
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("SigBlk:"))
      return (std::stoull(line.substr(7), nullptr, 16) >> (number - 1) & 1) != 0;
  return false;
}
#endif

// What rank `rank` does in a test of this name.
void rank_of(const std::string& mode, int rank) {
  std::this_thread::sleep_for(50ms);
  const auto wait = [] { std::this_thread::sleep_for(60s); };
  if (mode == "killed") {
    if (rank == 1) kill(getpid(), SIGKILL);
    wait();
  } else if (mode == "throws") {
    if (rank == 1) {
      std::fputs("last words", stdout);
      throw std::out_of_range("no such digit");
    }
    wait();
  } else if (mode == "consequence first") {
    if (rank == 0) throw lockstep::PeerError("rank 1 has gone");
    std::this_thread::sleep_for(300ms);
    if (rank == 1) throw lockstep::Error("the cause");
    wait();
  } else if (mode == "consequence alone") {
    if (rank == 0) throw lockstep::PeerError("rank 7 has gone");
    wait();
  } else if (mode == "cause ended well") {
    if (rank == 1) return;
    std::this_thread::sleep_for(rank == 0 ? 300ms : 60s);
    throw lockstep::PeerError(lockstep::Failure{.kind = lockstep::FailureKind::consequence,
                                                .cause = 1,
                                                .message = "rank 1 failed first: it does not answer"});
  } else if (mode == "first ends") {
    if (rank == 0) return;
    if (std::system("(sleep 0.1 &)") != 0) return;  // which becomes a child of the launcher
    say(fmt::format("ready {}", rank));
    wait();
  } else if (mode == "no memory" || mode == "no memory to report") {
    if (rank != 1) wait();
    lockstep::Failure failure{.message = "a cause that was known while there was memory"};
    use_up_memory();
    if (mode == "no memory") throw 7;
    lockstep::detail::fail_process(std::move(failure));
  } else if (mode == "usage") {
    throw lockstep::UsageError("--epochs -1 is too small");
  } else if (mode == "code") {
    if (rank == 1) std::exit(7);
    wait();
  } else if (mode == "stubborn") {
    signal(SIGTERM, SIG_IGN);
    say(fmt::format("ready {}", rank));
    std::this_thread::sleep_for(300ms);
    if (rank == 1) throw lockstep::Error("tired");
    wait();
  } else if (mode == "stopped") {
    if (rank == 0) raise(SIGSTOP);
    std::this_thread::sleep_for(200ms);
    if (rank == 1) throw lockstep::Error("tired");
    wait();
  } else if (mode == "destructor") {
    // Its destructor would wait for a peer; it must not get the chance to.
    struct Waits {
      ~Waits() { std::this_thread::sleep_for(60s); }
    } waits;
    if (rank == 1) throw lockstep::Error("thrown past a destructor that waits");
    wait();
  } else if (mode == "throwing destructor") {
    struct Throws {
      ~Throws() noexcept(false) { throw lockstep::Error("thrown by a destructor"); }
    };
    if (rank == 1) Throws throws;
    wait();
  } else if (mode == "other thread") {
    if (rank == 1) std::thread([] { throw lockstep::Error("thrown by a loader's thread"); }).detach();
    wait();
  } else if (mode == "handles") {
    static std::atomic<int> got{0};
    for (int number : forwarded) signal(number, [](int n) { got = n; });
    say(fmt::format("ready {}", rank));
    while (got == 0) std::this_thread::sleep_for(5ms);
    say(fmt::format("got {}", got.load()));
  } else if (mode == "counts") {  // goes on through every SIGHUP and SIGUSR1 that it gets, until SIGTERM
    static std::atomic<int> hangups{0}, users{0}, ended{0};
    for (int number : {SIGHUP, SIGUSR1, SIGTERM})
      if (signal(number, [](int n) { ++(n == SIGHUP ? hangups : n == SIGUSR1 ? users : ended); }) == SIG_IGN)
        signal(number, SIG_IGN);
    say(fmt::format("ready {}", rank));
    // After each change of either: signals that are sent one after the other may be handled in any order.
    for (int seen_users = 0, seen_hangups = 0; ended == 0; std::this_thread::sleep_for(5ms)) {
      if (users == seen_users && hangups == seen_hangups) continue;
      seen_hangups = hangups;
      if (users > seen_users) ++seen_users;
      say(fmt::format("users {} hangups {} at {}", seen_users, seen_hangups, rank));
    }
    say(fmt::format("ended {}", rank));
  } else if (mode == "saves" || mode == "peer after signal") {
    static std::atomic<int> got{0};
    const bool handles = mode == "saves" || rank == 0;
    if (handles)
      for (int number : {SIGINT, SIGTERM, SIGUSR1}) signal(number, [](int n) { got = n; });
    say(fmt::format("ready {}", rank));
    while (got == 0) std::this_thread::sleep_for(5ms);
    if (mode == "peer after signal") throw lockstep::PeerError("rank 1 has gone");
    std::this_thread::sleep_for(rank * 300ms);
    say("saved");
    std::exit(75);
  } else if (mode == "deaf") {
    for (int number : {SIGINT, SIGTERM}) signal(number, SIG_IGN);
    say(fmt::format("ready {}", rank));
    wait();
  } else if (mode == "peer while others go on") {
    for (int number : {SIGINT, SIGTERM, SIGUSR1}) signal(number, SIG_IGN);
    say(fmt::format("ready {}", rank));
    std::this_thread::sleep_for(rank == 0 ? 2500ms : 60s);
    throw lockstep::PeerError("rank 7 has gone");
  } else if (mode == "leaves after signal") {
    static std::atomic<int> got{0};
    signal(SIGUSR1, [](int n) { got = n; });
    say(fmt::format("ready {}", rank));
    while (got == 0 || rank != 1) std::this_thread::sleep_for(5ms);
    std::exit(75);
  } else if (mode == "stops") {
    say(fmt::format("ready {}", rank));
    if (rank == 0) raise(SIGSTOP);
    wait();
  } else if (mode == "torn") {
    for (int line = 0; line < 200; ++line)
      for (const auto& piece : {fmt::format("{} of ", line), fmt::format("{} ", rank), std::string("end\n")})
        if (write(1 + line % 2, piece.data(), piece.size()) < 0) return;
  } else if (mode == "flood") {
    for (int line = 0; line < 100000; ++line)
      std::printf("%d of %d xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n", line, rank);
  } else if (mode == "much after SIGUSR1") {
    static std::atomic<bool> told{false};
    signal(SIGUSR1, [](int) { told = true; });
    say(fmt::format("ready {}", rank));
    while (!told) std::this_thread::sleep_for(5ms);
    for (int line = 0; line < 5000; ++line)
      std::printf("%d of %d xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n", line, rank);
  } else if (mode == "grandchild") {
    if (fork() == 0) {
      std::this_thread::sleep_for(60s);
      _exit(0);
    }
    say("gone");
  }
}

int supervise(int size, int argc, char** argv) {
  // Such as a thread pool has them: none of the launching process's signals is blocked there.
  for (int i = 0; i < 3 && std::getenv("LOCKSTEP_TEST_THREADS"); ++i)
    std::thread([] { std::this_thread::sleep_for(60s); }).detach();
  lockstep::detail::SupervisorOptions options;
  options.arguments.assign(argv, argv + argc);
  for (int rank = 0; rank < size; ++rank)
    options.jobs.push_back({rank, {"LOCKSTEP_TEST_CHILD=rank", fmt::format("LOCKSTEP_TEST_RANK={}", rank)}});
  if (std::string(argv[1]) == "no program") options.program = "/nonexistent/program";
  if (std::string(argv[1]) == "stopped") options.grace = 40000ms;  // SIGTERM alone ends it
  options.interrupt_grace = std::string(argv[1]) == "stops" ? 40000ms : 1500ms;
  return lockstep::detail::Supervisor(std::move(options)).run();
}

// Starts one process as torchrun's agent does (`session`: in a session of its own; `variable`: with
// torchrun's variables), and waits.
int play_agent(const std::string& mode) {
  if (fork() == 0) {
    // As long as loading LibTorch may take, in which the agent ends.
    if (mode.find("late") != std::string::npos)
      while (getppid() != 1) std::this_thread::sleep_for(10ms);
    if (mode.find("session") != std::string::npos) setsid();
    if (mode.find("variable") != std::string::npos) setenv("TORCHELASTIC_RUN_ID", "none", 1);
    setenv("LOCKSTEP_TEST_CHILD", "worker", 1);
    execl("/proc/self/exe", "worker", mode.c_str(), "1", static_cast<char*>(nullptr));
    _exit(127);
  }
  std::this_thread::sleep_for(60s);
  return 0;
}

// This program as a launching process of `size` ranks.
Process launcher(const std::string& mode, int size = 3, StartOptions options = {}) {
  return start({"/proc/self/exe", mode, std::to_string(size)}, {{"LOCKSTEP_TEST_CHILD", "launcher"}},
               options);
}

Ended ended(const std::string& mode, int size = 3, std::chrono::milliseconds timeout = 20s) {
  auto process = launcher(mode, size);
  REQUIRE(process.wait(timeout));
  return {process.exit_code(), process.out(), process.error(), processes_left(process.marker())};
}

void wait_until_ready(Process& process, int size) {
  for (int rank = 0; rank < size; ++rank) REQUIRE(process.wait_for_output(fmt::format("ready {}\n", rank)));
}

// One error is shown, and nothing else on stderr, and nobody is left.
void check_ended(const Ended& result, const lockstep::Failure& expected, int noticed_by = -1) {
  INFO(result.out << "---\n" << result.error);
  const auto said = reported(result.error);
  CHECK(result.code == expected.code);
  CHECK(said.alone);
  CHECK(said.failure.kind == expected.kind);
  CHECK(said.failure.rank == expected.rank);
  CHECK(said.failure.message == expected.message);
  CHECK(said.noticed_by == noticed_by);
  CHECK(result.left == 0);
}

}  // namespace

int lockstep_test::child_mode(const char* child, int argc, char** argv) {
  const std::string mode = argv[1];
  if (std::string(child) == "launcher") return supervise(std::atoi(argv[2]), argc, argv);
  if (std::string(child) == "agent") return play_agent(mode);
  if (std::string(child) == "worker") {
    lockstep::detail::end_with_agent();
    int signal_number = -1;
    prctl(PR_GET_PDEATHSIG, &signal_number);
    say(fmt::format("dies with its parent by signal {}", signal_number));
    std::this_thread::sleep_for(60s);
    return 0;
  }
  const int rank = std::atoi(std::getenv("LOCKSTEP_TEST_RANK"));
  lockstep::detail::process_rank = rank;
  lockstep::detail::run_without_handlers([&] { rank_of(mode, rank); });
  return 0;
}

TEST_CASE("a program that cannot be started again is told with the reason") {
  const auto result = ended("no program");
  CHECK(result.code == 127);
  CHECK(reported(result.error).failure.message ==
        "the program could not be executed again: No such file or directory");
}

TEST_CASE("the first failure is shown once, with its rank, and ends the others") {
  using lockstep::FailureKind;
  struct Case {
    std::string mode;
    lockstep::Failure expected;
    int noticed_by = -1;
  };
  for (const auto& [mode, expected, noticed_by] : std::vector<Case> {
         {"killed",
          {.kind = FailureKind::died,
           .rank = 1,
           .code = 128 + SIGKILL,
           .message = "died (SIGKILL, perhaps for lack of memory)"}},
             {"code", {.kind = FailureKind::died, .rank = 1, .code = 7, .message = "ended with exit code 7"}},
             {"usage", {.kind = FailureKind::usage, .code = 2, .message = "--epochs -1 is too small"}},
             {"throws", {.rank = 1, .message = "std::out_of_range: no such digit"}},
             {"consequence first", {.rank = 1, .message = "the cause"}},
             {"consequence alone",
              {.rank = 7, .message = "has gone"},
              0},  // after a while, in which no cause came
             {"cause ended well",
              {.kind = FailureKind::left_early,
               .rank = 1,
               .message = "has ended with exit code 0 while other ranks still communicated with it; every "
                          "rank must make the same calls, and equally many"},
              0},
             {"stopped", {.rank = 1, .message = "tired"}},
             {"destructor", {.rank = 1, .message = "thrown past a destructor that waits"}},
             {"throwing destructor", {.rank = 1, .message = "thrown by a destructor"}},
             {"other thread", {.rank = 1, .message = "thrown by a loader's thread"}},
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // whose allocators end the process
             {"no memory", {.rank = 1, .message = "out of memory"}},
             {"no memory to report", {.rank = 1, .message = "a cause that was known while there was memory"}},
#endif
       }) {
    CAPTURE(mode);
    const auto result = ended(mode);
    check_ended(result, expected, noticed_by);
    if (mode == "throws") CHECK(result.out == "[rank 1] last words");
  }
}

TEST_CASE("a rank that ignores SIGTERM is killed after the grace") {
  const auto start = std::chrono::steady_clock::now();
  check_ended(ended("stubborn"), {.rank = 1, .message = "tired"});
  CHECK(std::chrono::steady_clock::now() - start > 3s);
}

TEST_CASE("a signal is forwarded whichever thread of the launching process it comes to") {
  for (const int number : forwarded)
    for (std::size_t receiver = 0; receiver < 5; ++receiver) {
      CAPTURE(number, receiver);
      auto process = start({"/proc/self/exe", "handles", "2"},
                           {{"LOCKSTEP_TEST_CHILD", "launcher"}, {"LOCKSTEP_TEST_THREADS", "1"}});
      wait_until_ready(process, 2);
      auto threads = threads_of(process.pid());
#ifdef __SANITIZE_THREAD__
      std::erase_if(threads, [&](pid_t thread) { return blocks(process.pid(), thread, number); });
#endif
      REQUIRE(threads.size() == 4);
      if (receiver < threads.size())
        REQUIRE(syscall(SYS_tgkill, process.pid(), threads[receiver], number) == 0);
      else
        process.signal(number);
      REQUIRE(process.wait(20s));
      CHECK(process.exit_code() == 0);
      CHECK(count(process.out(), fmt::format("got {}\n", number)) == 2);
    }
}

TEST_CASE("a signal that is ignored stays ignored") {
  for (const auto& [name, number] : {std::pair("HUP", SIGHUP), {"INT", SIGINT}, {"QUIT", SIGQUIT}}) {
    CAPTURE(name);
    auto process = start(
        {"bash", "-c", fmt::format("trap '' {}; exec '{}' counts 2", name, lockstep::detail::own_program())},
        {{"LOCKSTEP_TEST_CHILD", "launcher"}});
    wait_until_ready(process, 2);
    for (int i = 1; i <= 3; ++i) {
      process.signal_group(number);
      process.signal(SIGUSR1);  // comes behind it
      for (int rank : {0, 1})
        REQUIRE(process.wait_for_output(fmt::format("users {} hangups 0 at {}\n", i, rank)));
    }
    process.signal(SIGTERM);
    REQUIRE(process.wait(20s));
    CHECK(process.exit_code() == 0);
    CHECK(count(process.out(), "ended ") == 2);
  }
}

TEST_CASE("a terminal that closes hangs up twice and kills no rank") {
  auto process = launcher("counts", 2);
  wait_until_ready(process, 2);
  for (int i = 1; i <= 3; ++i) {
    process.signal(SIGHUP);
    process.signal(SIGUSR1);
    for (int rank : {0, 1})
      REQUIRE(process.wait_for_output(fmt::format("users {} hangups 1 at {}\n", i, rank)));
  }
  process.signal(SIGTERM);
  process.signal(SIGHUP);  // still none
  REQUIRE(process.wait(20s));
  CHECK(process.exit_code() == 0);
  CHECK(count(process.out(), "ended ") == 2);
}

TEST_CASE("ranks that end with a code of their own after a signal do not disturb each other") {
  for (const int number : {SIGUSR1, SIGTERM}) {
    auto process = launcher("saves", 3);
    wait_until_ready(process, 3);
    process.signal(number);
    REQUIRE(process.wait(20s));
    CHECK(process.exit_code() == 75);
    CHECK(process.error().empty());
    CHECK(count(process.out(), "saved\n") == 3);
  }
}

TEST_CASE("a consequence of Ctrl-C is not shown as an error") {
  auto process = launcher("peer after signal", 3);
  wait_until_ready(process, 3);
  process.signal(SIGINT);
  REQUIRE(process.wait(20s));
  CHECK(process.exit_code() == 130);
  CHECK(process.error().empty());
}

TEST_CASE("a failure is shown also after a signal that does not end the ranks") {
  for (const int number : {SIGUSR1, SIGINT}) {  // the second is ignored
    auto process = launcher("peer while others go on");
    wait_until_ready(process, 3);
    process.signal(number);
    REQUIRE(process.wait(20s));
    CHECK(process.exit_code() == 1);
    CHECK(reported(process.error()).failure.rank == 7);
    CHECK(reported(process.error()).noticed_by == 0);
  }
}

TEST_CASE("a rank that ends after SIGUSR1 while the others go on is named") {
  auto process = launcher("leaves after signal");
  wait_until_ready(process, 3);
  process.signal(SIGUSR1);
  REQUIRE(process.wait(20s));
  CHECK(process.exit_code() == 75);
  CHECK(reported(process.error()).failure.rank == 1);
  CHECK(reported(process.error()).failure.code == 75);
}

TEST_CASE("a stopped rank does not delay the end that a signal asks for") {
  for (const int number : {SIGTERM, SIGHUP}) {
    auto process = launcher("stops");
    wait_until_ready(process, 3);
    std::this_thread::sleep_for(100ms);
    process.signal(number);
    REQUIRE(process.wait(20s));
    CHECK(process.exit_code() == 128 + number);
  }
}

TEST_CASE("an exit code that a shell would read as 0 is not 0") {
  using lockstep::detail::exit_status;
  CHECK(exit_status(0) == 0);
  CHECK(exit_status(5) == 5);
  CHECK(exit_status(256) == 1);
  CHECK(exit_status(-512) == 1);
  CHECK((exit_status(-1) & 0xff) == 255);
}

TEST_CASE("no rank survives a launching process that is killed") {
  auto process = launcher("deaf");
  wait_until_ready(process, 3);
  CHECK(processes_with(process.marker()).size() == 4);
  process.signal(SIGKILL);
  REQUIRE(process.wait(20s));
  CHECK(processes_left(process.marker()) == 0);
}

TEST_CASE("a worker of torchrun dies with its agent, any other process outlives its parent") {
  for (const auto& [mode, number] :
       {std::pair("variable, session", SIGKILL), {"variable", 0}, {"session", 0}}) {
    CAPTURE(mode);
    auto agent = start({"/proc/self/exe", mode, "1"}, {{"LOCKSTEP_TEST_CHILD", "agent"}});
    REQUIRE(agent.wait_for_output(fmt::format("dies with its parent by signal {}\n", number)));
    CHECK(processes_with(agent.marker()).size() == 2);
    agent.signal(SIGKILL);
    REQUIRE(agent.wait(20s));
    if (number != 0)
      CHECK(processes_left(agent.marker(), 20s) == 0);
    else
      for (const pid_t worker : processes_with(agent.marker())) CHECK(kill(worker, SIGKILL) == 0);
  }
}

TEST_CASE("a worker of torchrun whose agent died before it could ask for a signal ends at once") {
  auto agent = start({"/proc/self/exe", "variable, session, late", "1"}, {{"LOCKSTEP_TEST_CHILD", "agent"}});
  for (int tries = 0; tries < 4000 && processes_with(agent.marker()).size() < 2; ++tries)
    std::this_thread::sleep_for(5ms);
  agent.signal(SIGKILL);
  REQUIRE(agent.wait(20s));
  const auto orphans = processes_with(agent.marker());
  if (!orphans.empty() && process_state(orphans[0]).parent != 1) {
    for (const pid_t orphan : orphans) kill(orphan, SIGKILL);
    WARN("SKIPPED: another process than init takes over orphans here");
    return;
  }
  CHECK(processes_left(agent.marker(), 20s) == 0);
}

TEST_CASE("a parent that has ended already is noticed") {
  const pid_t child = fork();
  if (child == 0) {
    const bool mine = lockstep::detail::die_with_parent(getppid());
    _exit(mine && !lockstep::detail::die_with_parent(getpid()) ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

TEST_CASE("what a rank leaves behind is ended with it") {
  const auto result = ended("grandchild", 2);
  CHECK(result.code == 0);
  CHECK(result.left == 0);
}

TEST_CASE("no zombie stays while the others run") {
  auto process = launcher("first ends", 3);
  const auto become = [&](const auto& condition) {
    for (int tries = 0; tries < 2000 && !condition(); ++tries) std::this_thread::sleep_for(10ms);
    return condition();
  };
  for (int rank : {1, 2}) REQUIRE(process.wait_for_output(fmt::format("ready {}\n", rank)));
  // A zombie no longer counts: its environment is gone.
  REQUIRE(become([&] { return processes_with(process.marker()).size() == 3; }));
  CHECK(become([&] { return zombies_of(process.pid()) == 0; }));
  CHECK(processes_with(process.marker()).size() == 3);
  process.signal(SIGTERM);
  CHECK(process.wait(20s));
}

TEST_CASE("lines that are written in pieces are never torn") {
  const auto result = ended("torn", 4);
  CHECK(result.code == 0);
  std::multiset<std::string> lines;
  for (const auto* text : {&result.out, &result.error}) {
    std::istringstream in(*text);
    for (std::string line; std::getline(in, line);) lines.insert(line);
  }
  CHECK(lines.size() == 800);
  for (int rank = 0; rank < 4; ++rank)
    for (int line = 0; line < 200; ++line) {
      const auto text =
          fmt::format("{}{} of {} end", rank == 0 ? "" : fmt::format("[rank {}] ", rank), line, rank);
      REQUIRE(lines.count(text) == 1);
    }
}

TEST_CASE("nothing of a flood is lost") {
  const auto result = ended("flood", 2, 60s);
  CHECK(result.code == 0);
  CHECK(count(result.out, "\n") == 200000);
}

TEST_CASE("signals are forwarded though nobody reads the output") {
  auto process = launcher("flood", 2);
  std::this_thread::sleep_for(500ms);  // by now the pipes are full
  process.signal(SIGTERM);
  REQUIRE(process.wait(20s));
  CHECK(process.exit_code() == 128 + SIGTERM);
  CHECK(processes_left(process.marker()) == 0);
}

TEST_CASE("a signal ends a launching process whose last lines nobody reads") {
  auto process = launcher("much after SIGUSR1", 2);
  wait_until_ready(process, 2);
  process.signal(SIGUSR1);
  bool alone = false;
  for (int tries = 0; tries < 4000 && !alone; ++tries) {
    alone = processes_with(process.marker()).size() == 1;
    std::this_thread::sleep_for(5ms);
  }
  REQUIRE(alone);
  for (int tries = 0; tries < 1000 && process_state(process.pid()).state != 'S'; ++tries)
    std::this_thread::sleep_for(5ms);
  CHECK(process_state(process.pid()).state == 'S');
  process.signal(SIGINT);
  for (int tries = 0; tries < 100 && process_state(process.pid()).state != 'Z'; ++tries)
    std::this_thread::sleep_for(50ms);
  CHECK(process_state(process.pid()).state == 'Z');  // without having been read
  REQUIRE(process.wait(20s));
  CHECK(process.exit_code() == 128 + SIGINT);
}

TEST_CASE("processes that have been started end with a failure to start the others") {
  int ended = 0;
  lockstep::detail::SupervisorOptions options;
  options.program = "/bin/sleep";
  options.arguments = {"sleep", "61.7"};
  options.jobs = {{0, {}}, {1, {}}};
  options.started = [] { throw lockstep::Error("no store"); };
  CHECK_THROWS_WITH(lockstep::detail::Supervisor(std::move(options)).run(), "no store");
  errno = 0;
  while (waitpid(-1, nullptr, WNOHANG) >= 0) ++ended;
  CHECK(errno == ECHILD);  // none is left, neither alive nor unknown
  CHECK(ended == 0);
}

TEST_CASE("signals of two kinds in turn end stubborn ranks as well") {
  auto process = launcher("deaf", 2);
  wait_until_ready(process, 2);
  for (int number : {SIGINT, SIGTERM, SIGINT, SIGTERM}) {
    process.signal(number);
    std::this_thread::sleep_for(100ms);
  }
  REQUIRE(process.wait(20s));
  CHECK(process.exit_code() >= 128);
  CHECK(processes_left(process.marker()) == 0);
}

TEST_CASE("a reader that goes away ends the run as it would end one program") {
  const auto marker = new_marker();
  auto process = start(
      {"bash", "-c",
       fmt::format("'{}' flood 2 | head -n 1; exit ${{PIPESTATUS[0]}}", lockstep::detail::own_program())},
      {{"LOCKSTEP_TEST_CHILD", "launcher"}, {marker_variable, marker}});
  REQUIRE(process.wait(20s));
  CHECK(process.exit_code() == 128 + SIGPIPE);
  CHECK(process.error().empty());
  CHECK(processes_left(marker) == 0);
}

TEST_CASE("the first failure is that of a killed rank, then a cause, then the earlier, once it has settled") {
  using lockstep::FailureKind;
  std::vector<lockstep::Failure> failures;
  const auto first_rank = [&](std::chrono::nanoseconds waited) {
    const auto* first = lockstep::detail::first_failure(failures, waited);
    return first == nullptr ? -1 : first->rank;
  };
  CHECK(first_rank(std::chrono::nanoseconds::max()) == -1);
  failures.push_back({.kind = FailureKind::consequence, .rank = 0, .time = 1});
  CHECK(first_rank(1900ms) == -1);
  CHECK(first_rank(2000ms) == 0);
  failures.push_back({.rank = 1, .time = 9});
  failures.push_back({.rank = 2, .time = 8});
  CHECK(first_rank(40ms) == -1);
  CHECK(first_rank(50ms) == 2);
  failures.push_back(lockstep::detail::failure_by_status(3, 811, SIGTERM, 7));
  CHECK(first_rank(0ms) == -1);
  CHECK(first_rank(50ms) == 3);
  failures.push_back(lockstep::detail::failure_by_status(4, 812, SIGKILL, 10));
  CHECK(first_rank(0ms) == 4);
}

TEST_CASE("a rank that had ended well is the cause if it is blamed, or alone was waited for") {
  using lockstep::FailureKind;
  const auto judged = [](lockstep::Failure failure, std::vector<int> gone) {
    return lockstep::detail::judged(std::move(failure), gone);
  };
  const lockstep::Failure error{.rank = 2, .message = "x"};
  CHECK(judged(error, {1}).kind == FailureKind::error);
  for (const auto kind : {FailureKind::timed_out, FailureKind::consequence}) {
    const lockstep::Failure blames{.kind = kind, .rank = 2, .pid = 7, .cause = 1, .code = 9, .message = "x"};
    CHECK(judged(blames, {0}).cause_kind == FailureKind::error);
    const auto left = judged(blames, {0, 1});
    CHECK(left.kind == FailureKind::consequence);
    CHECK(left.cause_kind == FailureKind::left_early);
    CHECK(std::tuple(left.rank, left.pid, left.cause, left.code) == std::tuple(2, 7, 1, 9));
  }
}

TEST_CASE("a failure survives its way through a pipe, and a plain text is its message") {
  const lockstep::Failure failure{.kind = lockstep::FailureKind::consequence,
                                  .rank = 3,
                                  .host = "nodeA",
                                  .pid = 811,
                                  .cause = 1,
                                  .cause_kind = lockstep::FailureKind::left_early,
                                  .code = 9,
                                  .call = {"recv", 7, 2, -5, "bucket 1", "Trainer::fit", ""},
                                  .type = "lockstep::PeerError",
                                  .message = "several\nlines",
                                  .time = 12345678901234};
  const auto facts = [](const lockstep::Failure& of) {
    return std::tuple(of.kind, of.rank, of.host, of.pid, of.cause, of.cause_kind, of.code, of.type, of.time,
                      of.call.operation, of.call.sequence, of.call.peer, of.call.tag, of.call.label,
                      of.call.served);
  };
  const std::string bytes = lockstep::detail::report_of(failure);
  const auto copy = lockstep::detail::decode_report(bytes);
  CHECK(facts(copy) == facts(failure));
  CHECK(copy.message == "several\\nlines");
  CHECK(lockstep::detail::decode_report("out of memory").message == "out of memory");
  for (std::size_t cut = 0; cut < bytes.size(); ++cut)
    CHECK_NOTHROW(lockstep::detail::decode_report(bytes.substr(0, cut)));
}

TEST_CASE("each failure has its text, by kind and point of view") {
  namespace detail = lockstep::detail;
  using lockstep::FailureKind;
  const lockstep::FailedCall call{"b", 4, -1, 0, "", "Trainer::fit", ""},
      joining{.operation = detail::rendezvous};
  CHECK(detail::text_of(call) == "b #4 of Trainer::fit");
  CHECK(detail::text_of({"send", 0, 2, 5, "", "", ""}) == "send to rank 2 (tag 5)");
  CHECK(detail::text_of({"recv", 0, 2, 5, "", "", ""}) == "recv from rank 2 (tag 5)");
  CHECK(detail::text_of(joining) == "the rendezvous");
  CHECK(detail::text_of({"rendezvous", 0, -1, 0, "communicator 'x'", "", ""}) ==
        "the rendezvous of the communicator 'x'");
  CHECK(detail::text_of({"rendezvous", 0, -1, 0, "communicator 'x'", "the constructor of Trainer", ""}) ==
        "the constructor of Trainer (communicator 'x')");

  const lockstep::Failure error{.rank = 1, .message = "x"};
  CHECK(detail::cause_text(error) == "rank 1 failed first: x");
  CHECK(detail::cause_text({.message = "x"}) == "another rank failed first: x");
  const lockstep::Failure died{
      .kind = FailureKind::died, .rank = 1, .host = "nodeA", .pid = 7, .message = "died (SIGKILL)"};
  CHECK(detail::cause_text(died) == "rank 1 (pid 7 on nodeA) died (SIGKILL)");
  CHECK(detail::cause_text(detail::left_early(1, {.operation = "a", .sequence = 3}, 2, call)) ==
        "rank 1 has left after a #3 while rank 2 waits in b #4 of Trainer::fit; every rank must make the "
        "same calls, and equally many");
  CHECK(detail::cause_text(detail::ended_early(1, 2, joining)) ==
        "rank 1 has ended with exit code 0 while rank 2 waits in the rendezvous; every rank must make the "
        "same calls, and equally many");
  CHECK(detail::cause_text(detail::ended_early(1, 2, {})) ==
        "rank 1 has ended with exit code 0 while other ranks still communicated with it; every rank must "
        "make the same calls, and equally many");

  CHECK(detail::headline(error, "rank 1") == "rank 1 failed: x");
  CHECK(detail::headline({.kind = FailureKind::usage, .message = "x"}, "rank 1") == "x");
  CHECK(detail::headline({.kind = FailureKind::died, .message = "died (SIGKILL)"}, "rank 1") ==
        "rank 1 died (SIGKILL)");
  const auto consequence = detail::consequence_of(error, 2, call);
  CHECK(std::tuple(consequence.rank, consequence.cause, consequence.call.sequence) == std::tuple(2, 1, 4));
  CHECK(detail::headline(consequence, "rank 2") == "rank 1 failed first: x; noticed by rank 2");
  const lockstep::Failure own{.rank = 2, .pid = 7, .message = "x"};
  CHECK(detail::headline(own, std::vector<int>{}) == "rank 2 (pid 7) failed: x");
  CHECK(detail::headline(own, std::vector<int>{1}) ==
        "rank 2 (pid 7) failed: x; rank 1 had ended by then, with exit code 0");
  CHECK(detail::headline(own, std::vector<int>{0, 1, 3, 4, 5, 6}) ==
        "rank 2 (pid 7) failed: x; ranks 0, 1, 3, 4 and 2 more had ended by then, with exit code 0");
}

TEST_CASE("torchrun's error file is valid JSON") {
  const auto text = lockstep::detail::elastic_error({.message = "a \"quoted\"\nline\t\\"}, 1795233130);
  CHECK(text == R"({"message":{"message":"a \"quoted\"\u000aline\u0009\\","extraInfo":)"
                R"({"py_callstack":"a \"quoted\"\u000aline\u0009\\","timestamp":"1795233130"}}})");
}

TEST_CASE("a launching process leaves SIGALRM to a program that handles it") {
  const auto handler = [] {
    struct sigaction now {};
    sigaction(SIGALRM, nullptr, &now);
    return now.sa_handler;
  };
  const auto own = +[](int) {};
  const auto before = signal(SIGALRM, own);
  {
    const lockstep::detail::LauncherScope scope;
    CHECK(handler() == own);
  }
  signal(SIGALRM, SIG_DFL);
  {
    const lockstep::detail::LauncherScope scope;
    CHECK(handler() != own);
    CHECK(handler() != SIG_DFL);
  }
  CHECK(handler() == SIG_DFL);
  signal(SIGALRM, before);
}

TEST_CASE("a thread that can be left behind never begins its work after that") {
  std::atomic<int> late{0};
  for (int i = 0; i < 50; ++i) {
    const auto left = std::make_shared<std::atomic<bool>>(false);
    const lockstep::detail::LeavableThread thread([left, &late] {
      if (*left) ++late;
    });
    if (thread.cancel()) *left = true;  // it had not begun
  }
  std::this_thread::sleep_for(200ms);
  CHECK(late == 0);
}

TEST_CASE("a thread that can be left behind is joined after its work, and is left while it works") {
  const auto used = std::make_shared<int>(0);
  {
    const lockstep::detail::LeavableThread thread([used] { ++*used; });
    REQUIRE(thread.ends_within(10s));
    CHECK(*used == 1);
    CHECK(used.use_count() == 1);  // the work is destroyed
    thread.rethrow();
  }
  const lockstep::detail::LeavableThread failing([] { throw std::runtime_error("no route"); });
  REQUIRE(failing.ends_within(10s));
  CHECK_THROWS_WITH(failing.rethrow(), "no route");

  const auto go_on = std::make_shared<std::atomic<bool>>(false);
  const auto begin = std::chrono::steady_clock::now();
  {
    const lockstep::detail::LeavableThread stuck([go_on] {
      while (!*go_on) std::this_thread::sleep_for(1ms);
    });
    CHECK_FALSE(stuck.ends_within(50ms));
  }
  CHECK(std::chrono::steady_clock::now() - begin < 10s);
  *go_on = true;
}
