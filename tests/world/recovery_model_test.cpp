// Explores the model of the recovery protocol: all orders of its steps with few ranks and deaths, and random ones with more.
// What was found:
// - The continuation has to be the greatest committed unit. With the least one, ranks write the next unit's slots again, and
//   a death meanwhile leaves them torn for the rank that is ahead. That takes three ranks and two deaths.
// - "After u" has to be written before the launch of the last full collective. Before the last launch is too late if that
//   one is rooted: the root completes and commits u while a rank that dies has not written it.
// - Three slots suffice, and are needed. The slot for the continuation is never torn, since nobody commits u before each
//   rank has written "after u": stamps alone choose the slot. With another error, the mark of a whole slot turns wrong
//   numbers into an error.
// - The record of a finished loop holds the state that only the rank has, too, since the code between the loops draws from
//   it. The continuation, not the existence of a record, decides whether a loop is finished; at a continuation that is the
//   loop's last unit, the loop is restored from vaults, which have to be copies once the code between loops runs.
// - A rank whose function has returned stays a survivor until all have returned. A commit is not interrupted. A rank that
//   receives keeps its vault until the whole state has arrived.
#include "world/recovery_model.hpp"

#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <unordered_set>
#include <utility>
#include <vector>

#include "support/catch.hpp"

namespace recovery_model_test {

struct Coverage {
  Findings found;
  std::size_t states = 0, deaths = 0, recovered = 0, failed = 0;
  void count(const State& state) {
    deaths += static_cast<std::size_t>(state.deaths);
    recovered += state.end == State::done && state.deaths > 0;
    failed += state.end == State::failed;
  }
};

/// Visits each state that any order of actions with at most `deaths` deaths leads to, until one is wrong.
Coverage explore(const Program& program, std::size_t size, int deaths, Planted planted = {}) {
  Model model(program, size, planted);
  Coverage result;
  std::unordered_set<std::uint64_t> seen;
  std::vector<State> unvisited{model.start()};
  while (!unvisited.empty() && !model.wrong()) {
    const State state = std::move(unvisited.back());
    unvisited.pop_back();
    ++result.states;
    result.count(state);
    bool stuck = state.end == State::runs;
    const auto attempt = [&](Action action, std::size_t rank) {
      State next = state;
      if (state.end != State::runs || !model.act(next, action, rank)) return;
      stuck &= action == Action::die;
      model.forget(next);
      std::uint64_t hash = mixed(next.generation, static_cast<std::uint64_t>(next.deaths) * 4 + next.end);
      std::array<std::uint64_t, sizeof(Rank) / 8> words;
      for (const Rank& one : next.ranks) {
        std::memcpy(words.data(), &one, sizeof(Rank));
        for (const std::uint64_t word : words) hash = ((hash << 5 | hash >> 59) ^ word) * 0x9e3779b97f4a7c15;
      }
      if (seen.insert(hash).second) unvisited.push_back(std::move(next));
    };
    for (std::size_t rank = 0; rank < size; ++rank)
      for (const Action action : {Action::step, Action::interrupt, Action::die})
        if (action != Action::die || state.deaths < deaths) attempt(action, rank);
    attempt(Action::begin_generation, 0);
    if (stuck) model.add(hang);
  }
  result.found = model.found();
  return result;
}

/// Runs a random program in a random order, in which ranks are descheduled for a while, with up to four deaths.
void simulate(std::uint64_t seed, Planted planted, Coverage& coverage) {
  std::mt19937_64 random(seed);
  const auto draw = [&](std::uint64_t below) { return random() % below; };
  const std::size_t size = 2 + draw(draw(4) == 0 ? 7 : 3);
  Program program;
  for (auto left = 3 + draw(6); left > 0; --left) program.units.push_back(kinds[draw(std::size(kinds))]);
  program.first_loop = 1 + draw(program.units.size() - 1);
  Model model(program, size, planted);
  State state = model.start();
  std::uint64_t deaths = draw(5), next_death = draw(30 * size), awake = ~std::uint64_t{0};
  const std::uint64_t pace = 4 + draw(60);  // the mean number of steps until other ranks are descheduled
  bool anywhere = true;                     // the next death does not wait for a rank that stands at `point`
  At point = At::set_up;
  const auto move = [&](std::size_t rank) {
    if ((awake >> rank & 1) == 0) return false;
    if (draw(3) == 0 && model.act(state, Action::interrupt, rank)) return true;
    return model.act(state, Action::step, rank) || model.act(state, Action::interrupt, rank);
  };
  for (std::uint64_t time = 0; state.end == State::runs && !model.wrong(); ++time) {
    const std::size_t victim = draw(size);
    if (deaths > 0 && time >= next_death && (anywhere || state.ranks[victim].at == point) &&
        model.act(state, Action::die, victim)) {
      --deaths;
      next_death = time + draw((draw(2) == 0 ? 1 + draw(12) : 30) * size);
      anywhere = draw(2) == 0;
      point = static_cast<At>(draw(static_cast<std::uint64_t>(At::left)));
    }
    if (draw(pace) == 0) awake = draw(3) > 0 ? random() : ~std::uint64_t{0};
    if (draw(8) == 0 && model.act(state, Action::begin_generation, 0)) continue;
    const std::size_t first = draw(size);
    std::size_t tried = 0;
    while (tried < size && !move((first + tried) % size)) ++tried;
    if (tried < size || model.act(state, Action::begin_generation, 0)) continue;
    if (std::exchange(awake, ~std::uint64_t{0}) == ~std::uint64_t{0}) model.add(hang);
  }
  coverage.count(state);
  coverage.found |= model.found();
}

void check(const Coverage& coverage, bool fails) {
  CAPTURE(coverage.found, coverage.states, coverage.deaths, coverage.recovered, coverage.failed);
  CHECK(coverage.found.none());
  CHECK(coverage.recovered > 0);
  CHECK((coverage.failed > 0) == fails);  // only without a survivor
}
void simulate_all(std::uint64_t seeds) {
  Coverage coverage;
  for (std::uint64_t seed = 1; seed <= seeds && coverage.found.none(); ++seed) {
    CAPTURE(seed);
    simulate(seed, {}, coverage);
    CHECK(coverage.found.none());
  }
  check(coverage, true);
}
const Program four_units{{step, checkpoint, small_step, vote}, 2};
const Program one_unit{{vote}, 2};  // its loop ends the program

TEST_CASE("recovery: after deaths at any point, in any order, the run ends in the undisturbed run's state") {
  check(explore(four_units, 2, 2), true);
  check(explore({{step, checkpoint, vote}, 1}, 3, 1), false);
  check(explore(one_unit, 3, 2), false);
}
TEST_CASE("recovery: the same in longer explorations", "[.release]") {
  check(explore(four_units, 2, 4), true);
  check(explore(four_units, 3, 1), false);
  check(explore({{vote, vote}, 1}, 3, 2), false);
}
TEST_CASE("recovery: the same with up to eight ranks and four deaths in random orders") {
  simulate_all(10'000);
}
TEST_CASE("recovery: the same with very many random orders", "[.release]") {
  simulate_all(500'000);
}

TEST_CASE("recovery: the model finds each planted error") {
  struct Case {
    const char* name;
    Planted planted;
    Finding finding;
    std::size_t ranks = 2;  // that find it with two deaths
  };
  const Case cases[] = {
      {"two slots", {.two_slots = true}, error_with_survivor},
      {"two slots, torn ones taken", {.two_slots = true, .torn_slot = true}, rank_only},
      {"after u written after the last launch", {.late_write = true}, error_with_survivor},
      {"after u written before a rooted last launch", {.last_launch = true}, error_with_survivor},
      {"continuation after the least unit", {.least_unit = true}, replicated, 3},
      {"the same, sent to the ranks ahead", {.least_unit = true, .sends_back = true}, error_with_survivor, 3},
      {"rank 0 sends", {.rank_0_sends = true}, replicated},
      {"message of an older generation taken", {.stale_message = true}, replicated},
      {"unit counted as committed at its last launch", {.early_commit = true}, replicated},
      {"newest slot restored", {.newest_slot = true}, rank_only},
      {"process ends when its function returns", {.leaves = true}, hang},
      {"vault refers to tensors between loops", {.live_vault = true}, replicated},
      {"record without rank-only state", {.model_only_record = true}, replicated},
      {"record decides that a loop is finished", {.record_decides = true}, replicated},
      {"state received in place", {.receives_in_place = true}, error_with_survivor, 3},
      {"commit interrupted", {.interrupted_commit = true}, replicated},
  };
  for (const auto& [name, planted, finding, ranks] : cases) {
    CAPTURE(name);
    const Coverage explored = explore(ranks == 2 ? four_units : one_unit, ranks, 2, planted);
    CHECK(explored.found.any());
    Coverage coverage;
    for (std::uint64_t seed = 1; seed <= 10'000 && !coverage.found.test(finding) && ranks == 2; ++seed)
      simulate(seed, planted, coverage);
    coverage.found |= explored.found;
    CHECK(coverage.found.test(finding));
    CHECK(coverage.found.test(stale) == planted.stale_message);
  }
}
TEST_CASE("recovery: no torn slot has the continuation's stamp") {
  check(explore(four_units, 2, 2, {.torn_slot = true}), true);
  Coverage coverage;
  for (std::uint64_t seed = 1; seed <= 10'000; ++seed) simulate(seed, {.torn_slot = true}, coverage);
  check(coverage, true);
}

}  // namespace recovery_model_test
