#include "lockstep/world/detail/environment.hpp"

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "world/planned.hpp"

namespace environment_test {

using namespace lockstep_test;

namespace {

const Values master{{"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29500"}};

Values with_master(Values values) {
  values.insert(master.begin(), master.end());
  return values;
}

}  // namespace

TEST_CASE("without variables a process is alone") {
  const auto env = read({});
  CHECK(env.rank == 0);
  CHECK(env.size == 1);
  CHECK(env.rendezvous.empty());
  CHECK_FALSE(env.launched);
}

TEST_CASE("torchrun's variables are read") {
  const auto env = read(with_master({{"RANK", "5"},
                                     {"WORLD_SIZE", "7"},
                                     {"LOCAL_RANK", "2"},
                                     {"LOCAL_WORLD_SIZE", "4"},
                                     {"TORCHELASTIC_USE_AGENT_STORE", "True"}}));
  CHECK(env.rank == 5);
  CHECK(env.size == 7);
  CHECK(env.local_rank == 2);
  CHECK(env.local_size == 4);
  CHECK(env.launched);
  CHECK(env.store_is_hosted);
  CHECK(env.store_outlives_attempts);
  CHECK(env.rendezvous == "tcp://node1:29500");
  CHECK(env.rendezvous_origin == "MASTER_ADDR=node1, MASTER_PORT=29500");
}

TEST_CASE("a rank by hand hosts the store itself") {
  const auto env = read(with_master({{"RANK", "0"}, {"WORLD_SIZE", "2"}}));
  CHECK_FALSE(env.store_is_hosted);
  CHECK(env.local_size == 1);
}

TEST_CASE("what contradicts itself is refused, by name and value") {
  const auto rank = [](const std::string& number, const std::string& size, Values more = {}) {
    more.insert({{"RANK", number}, {"WORLD_SIZE", size}});
    return with_master(std::move(more));
  };
  for (const auto& [values, words] : std::vector<std::pair<Values, std::string>>{
           {rank("2", "2"), "RANK=2 is out of range: with WORLD_SIZE=2 it must be in 0 to 1"},
           {rank("-1", "2"), "RANK=-1"},
           {rank("one", "2"), "RANK='one' is not a whole number"},
           {rank("1.5", "2"), "RANK='1.5'"},
           {rank("0", "2 "), "WORLD_SIZE='2 ' is not a whole number"},
           {rank("0", "99999999999"), "WORLD_SIZE=99999999999 is out of range: it must be in 1 to 1048576"},
           {{{"WORLD_SIZE", "0"}}, "WORLD_SIZE=0"},
           {{{"RANK", "0"}}, "WORLD_SIZE is not"},
           {{{"WORLD_SIZE", "2"}}, "RANK is not"},
           {{{"LOCAL_RANK", "1"}},
            "LOCAL_RANK=1 is set but RANK is not: set RANK to the number of this process (with --nproc, of "
            "the "
            "first on this host) and WORLD_SIZE to the number of all ranks, or unset LOCAL_RANK"},
           {{{"LOCAL_WORLD_SIZE", "two"}}, "LOCAL_WORLD_SIZE='two'"},
           {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}},
            "; or unset RANK and WORLD_SIZE, for the rank of mpirun of Open MPI"},
           {changed(rank("1", "2"), "MASTER_ADDR", ""), "MASTER_ADDR is not set"},
           {changed(rank("1", "2"), "MASTER_PORT", ""), "MASTER_PORT is not set"},
           {changed(rank("1", "2"), "MASTER_PORT", "70000"), "MASTER_PORT=70000 is out of range"},
           {rank("0", "4", {{"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}), "LOCAL_RANK=2 is out of range"},
           {rank("0", "2", {{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "3"}}),
            "LOCAL_WORLD_SIZE=3 is out of range: with WORLD_SIZE=2 it must be in 1 to 2"}})
    refused(values, words);
  CHECK(read({{"LOCAL_RANK", "0"}}).size == 1);  // a script may number one process, too
}

TEST_CASE("a local rank without the number of local ranks is checked once all ranks have joined") {
  for (const int local : {0, 1}) {
    const auto env =
        read(with_master({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", std::to_string(local)}}));
    CHECK(env.expected_local_rank == local);
    CHECK_FALSE(env.launched);
  }
  CHECK_FALSE(read(with_master({{"RANK", "1"}, {"WORLD_SIZE", "2"}})).expected_local_rank);
  CHECK(read({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}}).local_size == 1);
}

TEST_CASE("a rendezvous is a tcp URL") {
  CHECK(lockstep::detail::parse_rendezvous("tcp://a:12").port == 12);
  CHECK(lockstep::detail::parse_rendezvous("tcp://[::1]:12").host == "::1");

  for (const char* bad : {"tcp://a", "tcp://:1", "tcp://a:0", "tcp://a:x", "file:///x", "http://a:1", ""})
    CHECK_THROWS_AS(lockstep::detail::parse_rendezvous(bad), lockstep::UsageError);
}

TEST_CASE("launch starts as many processes as it is told") {
  CHECK(plan({"--nproc", "3"}, {}).nproc == 3);
  CHECK(plan({"--nproc=3"}, {}).environment.size == 3);
  CHECK(plan({"--nproc-per-node", "3"}, {}).environment.size == 3);
  CHECK(plan({"--nproc-per-node=4", "--nproc", "3"}, {}).environment.size == 3);
  CHECK(plan({"--nproc", "4"}, {}, {.nproc = 3, .nproc_flag = false}).environment.size == 3);
  CHECK(plan({}, {}, {.nproc = 5}).nproc == 5);
  CHECK(plan({"--nproc", "3"}, {}, {.nproc = 5}).nproc == 3);
  // LaunchOptions::nproc is a default, which RANK and WORLD_SIZE replace.
  for (const bool flag : {true, false}) {
    const lockstep::LaunchOptions two{.nproc = 2, .nproc_flag = flag};
    CHECK(plan({}, with_master({{"RANK", "1"}, {"WORLD_SIZE", "2"}}), two).worker);
    CHECK(plan({}, with_master({{"RANK", "2"}, {"WORLD_SIZE", "4"}}), two).worker);
    CHECK(plan({}, {{"WORLD_SIZE", "3"}}, two).nproc == 3);
    CHECK(plan({}, {{"WORLD_SIZE", "1"}}, two).worker);
  }
  const auto named = plan({"--nproc", "3"}, with_master({{"RANK", "1"}, {"WORLD_SIZE", "4"}}), {.nproc = 2});
  CHECK(named.environment.rank == 1);
  CHECK(named.nproc == 3);
  CHECK(plan({"--nproc", "1"}, {}).worker);
  CHECK_FALSE(plan({"--nproc", "2"}, {}).worker);
  CHECK(plan({"--", "--nproc", "0"}, {}, {.nproc = 2}).nproc == 2);
  CHECK(plan({"--prefix", "never"}, {}).prefix == lockstep::Prefix::never);
  CHECK(plan({"--prefix=always"}, {}).prefix == lockstep::Prefix::always);
  CHECK(plan({"--timeout", "90"}, {}).timeout == 90);
  CHECK_FALSE(plan({}, {{"LOCKSTEP_TIMEOUT", "90"}}).timeout);
  // A loopback address tells of no other host.
  CHECK(plan({"--nproc", "2"}, {{"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}}).environment.size == 2);
}

TEST_CASE("of a launch argument that is given twice the last counts") {
  CHECK(plan({"--nproc", "2", "--nproc", "3"}, {}).nproc == 3);
  CHECK(plan({"--nproc=2", "--nproc", "3", "--nproc=4", "--", "--nproc", "5"}, {}).nproc == 4);
  CHECK(plan({"--prefix=always", "--prefix", "never"}, {}).prefix == lockstep::Prefix::never);
}

TEST_CASE("bad launch arguments are refused on one line") {
  for (const std::string bad : {"0", "-1", "three", "2.5", ""})
    refused({"--nproc", bad}, {}, "--nproc " + bad);
  for (const std::string bad : {"0", "-1", "soon", "2.5", ""})
    refused({"--timeout", bad}, {}, "--timeout " + bad);
  const Values launched =
      with_master({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}});
  const auto first = [](const std::string& rank, const std::string& size) {
    return with_master({{"RANK", rank}, {"WORLD_SIZE", size}});
  };
  using Arguments = std::vector<std::string>;
  for (const auto& [arguments, values, words] : std::vector<std::tuple<Arguments, Values, std::string>>{
           {{"--nproc"}, {}, "--nproc needs a value"},
           {{"--nproc", "2", "--nproc"}, {}, "--nproc needs a value"},
           {{"--nproc", "100000"}, {}, "--nproc 100000 is more than 64 processes"},
           {{"--prefix", "loud"}, {}, "--prefix loud is unknown"},
           {{"--threads", "none"}, {}, "--threads none is not a number"},
           {{"--max-restarts", "-1"}, {}, "--max-restarts -1 is not a number of restarts"},
           {{}, {{"LOCKSTEP_TIMEOUT", "soon"}}, "LOCKSTEP_TIMEOUT='soon'"},
           {{}, {{"LOCKSTEP_HEARTBEAT_TIMEOUT", "soon"}}, "LOCKSTEP_HEARTBEAT_TIMEOUT='soon'"},
           {{"--nproc", "3"},
            launched,
            "--nproc 3 contradicts the launcher that has set LOCAL_RANK, which has started 2 of 2 ranks on "
            "this "
            "host (RANK, WORLD_SIZE): leave --nproc out"},
           {{"--nproc", "2"}, {{"WORLD_SIZE", "3"}}, "WORLD_SIZE=3 contradicts --nproc 2"},
           {{"--nproc", "2"}, first("1048575", "1048576"), "its last is 1048576"},
           {{"--nproc", "5"}, first("3", "7"), "WORLD_SIZE=7 allows no rank above 6"},
           {{"--nproc", "2"}, {{"RANK", "0"}, {"WORLD_SIZE", "7"}}, "MASTER_ADDR"},
           {{"--nproc", "2"},
            changed(first("0", "4"), "LOCAL_RANK", "0"),
            "--nproc 2 contradicts the launcher that has set LOCAL_RANK, which has started this process"}})
    refused(arguments, values, words);
}

TEST_CASE("a rank that may be started again has a launcher, and knows which start it is of") {
  CHECK_FALSE(plan({"--nproc", "1", "--max-restarts", "3"}, {}).worker);
  CHECK(plan({"--nproc", "1", "--max-restarts", "0"}, {}, {.max_restarts = 3}).worker);
  const auto last = with_master({{"RANK", "3"}, {"WORLD_SIZE", "4"}});
  CHECK_FALSE(plan({"--nproc", "1", "--max-restarts", "3"}, last).worker);
  CHECK(plan({"--max-restarts", "3"}, last).worker);
  const auto two = plan({"--nproc", "2"}, {}, {.max_restarts = 3});
  CHECK(two.max_restarts == 3);
  Values rank;
  const auto jobs = jobs_of(two, "tcp://127.0.0.1:29500", "", 2);
  for (const auto& change : jobs.at(1).environment)
    rank[change.substr(0, change.find('='))] = change.substr(std::min(change.size(), change.find('=') + 1));
  std::erase_if(rank, [](const auto& one) { return one.second.empty(); });
  CHECK(read(rank).restart == 2);
  CHECK(read(changed(rank, "LOCKSTEP_STORE_IS_HOSTED", "")).restart == 0);  // another launcher's
  refuses<lockstep::UsageError>([] { plan({}, {}, {.max_restarts = -1}); },
                                "LaunchOptions::max_restarts = -1");
}

TEST_CASE("under a launcher a process is one worker") {
  const Values launched =
      with_master({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}});
  CHECK(plan({}, launched).worker);
  CHECK(plan({"--nproc", "2"}, launched).worker);
}

TEST_CASE("by hand on several hosts RANK is the first rank of this one") {
  const auto second = plan({"--nproc", "4"}, with_master({{"RANK", "3"}, {"WORLD_SIZE", "7"}}));
  CHECK(second.environment.rank == 3);
  CHECK(second.nproc == 4);
  CHECK(second.environment.size == 7);
  CHECK(second.environment.rendezvous == "tcp://node1:29500");
  const auto jobs = jobs_of(second, second.environment.rendezvous);
  REQUIRE(jobs.size() == 4);
  CHECK(jobs[0].rank == 3);
  CHECK(jobs[3].rank == 6);
  CHECK(plan({}, with_master({{"RANK", "1"}, {"WORLD_SIZE", "2"}})).worker);
}

TEST_CASE("a world size and an address without a rank are refused, since each host would run on its own") {
  for (const Values& address : {master, Values{{"MASTER_ADDR", "node1"}}}) {
    Values values = address;
    values["WORLD_SIZE"] = "2";
    for (const std::vector<std::string>& arguments :
         {std::vector<std::string>{}, std::vector<std::string>{"--nproc", "2"}})
      refused(arguments, values,
              "WORLD_SIZE=2 is set but RANK is not: set RANK to the number of this process (with --nproc, of "
              "the first on this host) and WORLD_SIZE to the number of all ranks, or unset WORLD_SIZE");
    values.erase("WORLD_SIZE");  // an exported address alone: ranks on this host
    CHECK(plan({"--nproc", "2"}, values).environment.rendezvous.empty());
    values["WORLD_SIZE"] = "1";
    CHECK(plan({}, values).worker);
  }
}

TEST_CASE("a process alone has no rendezvous, whatever address is exported") {
  for (const Values& values :
       {Values{}, Values{{"WORLD_SIZE", "1"}}, Values{{"RANK", "0"}, {"WORLD_SIZE", "1"}},
        Values{{"RANK", "0"},
               {"WORLD_SIZE", "1"},
               {"LOCAL_RANK", "0"},
               {"LOCAL_WORLD_SIZE", "1"},
               {"TORCHELASTIC_USE_AGENT_STORE", "True"}}}) {
    const auto env = read(with_master(values));
    CHECK(env.size == 1);
    CHECK(env.rendezvous.empty());
    CHECK(env.rendezvous_origin.empty());
  }
}

TEST_CASE("by hand all ranks of a run on one host meet at MASTER_ADDR, where another host is refused") {
  const auto all = plan({"--nproc", "2"}, with_master({{"RANK", "0"}, {"WORLD_SIZE", "2"}}));
  CHECK(all.environment.rendezvous == "tcp://node1:29500");
  CHECK(all.environment.rendezvous_origin == "MASTER_ADDR=node1, MASTER_PORT=29500");
}

TEST_CASE("on one host the world size is the number of processes") {
  CHECK(plan({}, {{"WORLD_SIZE", "3"}}).nproc == 3);
  CHECK(plan({"--nproc", "2"}, {{"RANK", "0"}, {"WORLD_SIZE", "2"}}).environment.rendezvous.empty());
}

TEST_CASE("every flag of launch can be left to the program") {
  const lockstep::LaunchOptions disabled{
      .nproc_flag = false, .prefix_flag = false, .timeout_flag = false, .max_restarts_flag = false};
  const auto plain =
      plan({"--nproc", "x", "--prefix", "loud", "--max-restarts", "x", "--timeout"}, {}, disabled);
  CHECK(plain.max_restarts == 0);
  CHECK(plain.prefix == lockstep::Prefix::automatic);
  CHECK_FALSE(plain.timeout);
}

}  // namespace environment_test
