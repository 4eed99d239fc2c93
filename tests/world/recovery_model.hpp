#pragma once

// A model of the recovery protocol, without processes: the order of its steps alone matters, so there is no clock. The
// replicated state of a rank and the state that only the rank has are numbers, which each unit mixes.
#include <algorithm>
#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace recovery_model_test {

// The decisions of the protocol. Units are numbered from 1 over all loops of a program; unit 0 is the state of its set-up.
using Unit = std::uint64_t;
enum class Collective : std::uint8_t {
  full,
  rooted
};  // full: no rank completes it before all have launched it

struct Continuation {
  Unit unit;
  std::size_t sender;
};
/// Returns the greatest unit that a rank has committed and the lowest rank that has; nothing if no rank holds a state.
/// `committed[rank]` is empty for a newcomer.
inline std::optional<Continuation> continuation(std::span<const std::optional<Unit>> committed) {
  const auto greatest = std::max_element(committed.begin(), committed.end());
  if (greatest == committed.end() || !*greatest) return std::nullopt;
  return Continuation{**greatest, static_cast<std::size_t>(greatest - committed.begin())};
}
/// Returns whether a rank restores the state that the sender sends, not that of its own vault.
inline bool receives(std::optional<Unit> committed, Unit continuation) {
  return committed != continuation;
}
/// Returns the collective of a unit before whose launch "after u" is written: the last full one, whose completion on any
/// rank proves that all ranks have written it.
inline std::size_t written_before(std::span<const Collective> unit) {
  return static_cast<std::size_t>(unit.rend() - std::find(unit.rbegin(), unit.rend(), Collective::full) - 1);
}
/// Returns whether a loop that ends with unit `last` restores its record. A loop that ends with the continuation itself
/// is restored from vaults and black boxes: some ranks may not have recorded it.
inline bool is_finished(Unit last, Unit continuation) {
  return last < continuation;
}
inline std::size_t slot_of(Unit unit, std::size_t slots = 3) {
  return unit % slots;
}
/// Returns the slot that holds "after `unit`", by its stamp.
template <class Slot>
const Slot* slot_for(std::span<const Slot> box, Unit unit) {
  const auto is_it = [&](const Slot& slot) { return slot.whole != 0 && slot.unit == unit; };
  const auto found = std::find_if(box.begin(), box.end(), is_it);
  return found == box.end() ? nullptr : &*found;
}

/// The planted errors.
struct Planted {
  bool two_slots = false, late_write = false, last_launch = false, least_unit = false, sends_back = false,
       rank_0_sends = false, torn_slot = false, stale_message = false, early_commit = false,
       newest_slot = false, leaves = false, live_vault = false, model_only_record = false,
       record_decides = false, receives_in_place = false, interrupted_commit = false;
};
enum Finding { replicated, rank_only, samples, apart, stale, error_with_survivor, hang, findings };
using Findings = std::bitset<findings>;

inline std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  a = (a ^ (b + 0x9e3779b97f4a7c15 + (a << 6) + (a >> 2))) * 0xff51afd7ed558ccd;
  return a ^ (a >> 32);
}
constexpr std::uint64_t torn = 0xdead;
struct Number {
  std::uint64_t state = 1;
  std::uint64_t count = 0;  // replicated: the sum of the hashes of all samples; rank-only: the data position
  void fold(const Number& part) { *this = {mixed(state, part.state), count + part.count}; }
};
struct Live {
  Number replicated = {}, rank_only = {};
  std::uint64_t between = 0;  // an object that the code between the loops makes, which no vault holds
};
struct UnitKind {
  std::vector<Collective> collectives;
  std::uint64_t draws;
};
using enum Collective;
// A step, which broadcasts buffers from rank 0; one without; a stop vote, an epoch's end or an evaluation; a checkpoint.
inline const UnitKind kinds[] = {
    {{rooted, full, full}, 2}, {{full, full}, 1}, {{full}, 0}, {{full, rooted}, 0}};
inline const auto &step = kinds[0], &small_step = kinds[1], &vote = kinds[2], &checkpoint = kinds[3];
struct Program {
  std::vector<UnitKind> units;
  Unit first_loop;  // the last unit of the first of two loops
  [[nodiscard]] const UnitKind& unit(Unit number) const { return units[number - 1]; }
};

inline Number after(const Live& live, const UnitKind& unit) {
  return {mixed(live.rank_only.state, live.replicated.state), live.rank_only.count + unit.draws};
}
inline Number contribution(const Live& live, const UnitKind& unit, std::size_t rank, std::size_t collective) {
  Number sent{mixed(mixed(live.rank_only.state, live.between), mixed(live.replicated.state, collective)), 0};
  for (std::uint64_t draw = 0; collective + 1 == unit.collectives.size() && draw < unit.draws; ++draw)
    sent.count += mixed(rank, live.rank_only.count + draw);
  return sent;
}
inline void run_between_loops(Live& live) {
  live.between = mixed(live.replicated.state, live.rank_only.state);
  live.rank_only.state = mixed(live.rank_only.state, 3);
  live.replicated.state = mixed(live.replicated.state, 4);
}

// The step that a rank takes next. It may die before each.
// clang-format off
enum class At : std::uint8_t { set_up, exchange, transfer, transferring, restore, launch, writing, completed, committing,
                               record, returned, unwound, left, dead };
// clang-format on
struct Slot {
  Unit unit = 0;
  Number content;
  std::uint64_t whole = 0;
};
struct Message {
  Number value;
  std::uint32_t generation = 0;
  std::uint16_t sequence = 0, whole = 0;
};
struct Process {
  struct Vault {
    Number state = {};
    Unit unit = 0;
    std::uint32_t filled = 0, was_filled = 0;
  } vault = {};
  Live live = {};
  Number outcome = {};
  Unit unit = 0, continuation = 0;
  std::uint32_t generation = 1;
  std::uint16_t begun = 2;  // the sequence number of the unit's first collective
  At at = At::set_up;
  std::uint8_t next = 0, written = 0, sender = 0, unused[6] = {};
};
/// A rank: its process, and what outlives the process in its launcher and in the network.
struct Rank : Process {
  std::array<Slot, 3> box;
  Live record;  // of the first loop
  std::uint64_t has_record = 0;
  std::array<Message, 11> messages;
};
static_assert(std::has_unique_object_representations_v<Rank>);  // it is hashed as bytes
struct State {
  std::vector<Rank> ranks;
  std::uint32_t generation = 1;
  int deaths = 0;
  enum { runs, done, failed } end = runs;
};
enum class Action { step, interrupt, die, begin_generation };

class Model {
 public:
  Model(Program program, std::size_t size, Planted planted = {})
      : program_(std::move(program)), reference_(program_.units.size() + 1, std::vector<Live>(size)) {
    State state = start();  // the run without deaths
    while (state.end == State::runs)
      for (std::size_t rank = 0; rank < size; ++rank) advance(state, state.ranks[rank], rank);
    std::uint64_t drawn = 0, sum = 0;
    for (Unit unit = 1; unit < reference_.size(); ++unit) {
      for (const auto last = drawn + program_.unit(unit).draws; drawn < last; ++drawn)
        for (std::size_t rank = 0; rank < size; ++rank) sum += mixed(rank, drawn);
      for (Live& live : reference_[unit]) live.replicated.count = sum;  // each sample once
    }
    planted_ = planted;
    has_reference_ = true;
    found_.reset();
  }
  [[nodiscard]] State start() const {
    State state{std::vector<Rank>(reference_[0].size())};
    for (Rank& rank : state.ranks) rank.vault = {{}, 0, 1, 1};
    return state;
  }
  void add(Finding finding) { found_.set(finding); }
  [[nodiscard]] Findings found() const { return found_; }
  /// Returns whether the run has gone wrong, which a stale message alone does not tell.
  [[nodiscard]] bool wrong() const { return Findings(found_).reset(stale).any(); }

  /// Returns false if the action is not possible.
  bool act(State& state, Action action, std::size_t me) {
    Rank& rank = state.ranks[me];
    const auto is_dead = [](const Rank& one) { return one.at == At::dead; };
    const bool broken = std::any_of(state.ranks.begin(), state.ranks.end(), is_dead);
    switch (action) {
      case Action::step:
        return advance(state, rank, me);
      case Action::interrupt:  // a call throws; the function ends
        if ((!broken && state.generation == rank.generation) || rank.at >= At::unwound) return false;
        if (rank.at == At::committing && !planted_.interrupted_commit) return false;
        return replace(rank, {.vault = rank.vault, .generation = rank.generation, .at = At::unwound});
      case Action::die:
        if (rank.at >= At::left) return false;
        ++state.deaths;
        return replace(rank, {.at = At::dead});
      case Action::begin_generation:  // the launcher has reaped the dead
        if (!broken) return false;
        if (std::all_of(state.ranks.begin(), state.ranks.end(), [](auto& one) { return one.at >= At::left; }))
          return fail(state);
        ++state.generation;
        for (Rank& one : state.ranks)
          if (one.at >= At::left) replace(one, {.generation = state.generation});
        return true;
    }
    return false;
  }
  /// Drops the messages that no rank can take any more, so that fewer states differ.
  void forget(State& state) const {
    for (const Rank& rank : state.ranks)
      if (planted_.stale_message || (rank.at != At::dead && rank.generation < state.generation)) return;
    for (Rank& rank : state.ranks)
      for (Message& message : rank.messages)
        if (message.generation < state.generation) message = {};
  }

 private:
  static bool replace(Rank& rank, const Process& process) {
    static_cast<Process&>(rank) = process;
    return true;
  }
  static bool go(Rank& rank, At at) {
    rank.at = at;
    return true;
  }
  bool fail(State& state) {
    state.end = State::failed;
    for (const Rank& rank : state.ranks)
      if (rank.vault.was_filled != 0) add(error_with_survivor);
    return true;
  }
  // A message stays until its sender sends another one in its place: no rank waits for it any more, then.
  static void send(Rank& rank, std::size_t sequence, const Number& value, bool whole = true) {
    const std::size_t place = sequence == 0 ? 8 + rank.generation % 2 : sequence == 1 ? 10 : sequence % 8;
    rank.messages[place] = {value, rank.generation, static_cast<std::uint16_t>(sequence), whole};
  }
  const Message* message(const Rank& from, const Rank& to, std::size_t sequence) {
    for (const Message& found : from.messages) {
      if (found.sequence != sequence || found.generation == 0 || found.generation > to.generation) continue;
      if (found.generation < to.generation && !planted_.stale_message) continue;
      if (found.generation < to.generation) add(stale);
      return &found;
    }
    return nullptr;
  }

  bool advance(State& state, Rank& rank, std::size_t me) {
    switch (rank.at) {
      case At::set_up:
        rank.live = {.rank_only = {.state = mixed(2, me)}};
        send(rank, 0, {rank.vault.unit, rank.vault.filled});
        return go(rank, At::exchange);
      case At::exchange:
        return regroup(state, rank, me);
      case At::transfer:
        if (me == rank.sender) send(rank, 1, rank.vault.state, false);
        if (!message(state.ranks[rank.sender], rank, 1)) return false;
        if (planted_.receives_in_place && me != rank.sender) rank.vault.filled = 0;
        return go(rank, At::transferring);
      case At::transferring: {
        if (me == rank.sender) send(rank, 1, rank.vault.state);
        const Message* sent = message(state.ranks[rank.sender], rank, 1);
        if (!sent || sent->whole == 0) return false;
        hold(state, rank, rank.continuation, sent->value);
        return go(rank, At::restore);
      }
      case At::restore:
        return restore(state, rank, me);
      case At::launch:
        return launch(state, rank, me);
      case At::writing:
        slot(rank) = {rank.unit, after(rank.live, program_.unit(rank.unit)), 1};
        rank.written = 1;
        return go(rank, At::launch);
      case At::completed:
        rank.vault.state.state = torn;  // the vault refers to the tensors that the commit changes
        return go(rank, At::committing);
      case At::committing:
        return commit(state, rank, me);
      case At::record:
        rank.record = rank.live;
        rank.has_record = 1;
        run_between_loops(rank.live);
        if (planted_.live_vault) rank.vault.state = rank.live.replicated;
        return begin_unit(rank);
      case At::unwound:
        if (state.generation == rank.generation) return false;
        return replace(rank, {.vault = rank.vault, .generation = state.generation});
      default:
        return false;
    }
  }
  bool regroup(State& state, Rank& rank, std::size_t me) {
    std::vector<std::optional<Unit>> committed;
    for (const Rank& from : state.ranks) {
      const Message* sent = message(from, rank, 0);
      if (!sent) return false;
      committed.push_back(sent->value.count != 0 ? std::optional(sent->value.state) : std::nullopt);
    }
    auto chosen = continuation(committed);
    if (!chosen) return fail(state);
    for (std::size_t i = committed.size(); planted_.least_unit && i-- > 0;)
      if (committed[i] && *committed[i] <= chosen->unit) chosen = {*committed[i], i};
    if (planted_.rank_0_sends) chosen->sender = 0;
    const auto takes = [&](std::optional<Unit> unit) {
      return planted_.least_unit && !planted_.sends_back ? unit < chosen->unit : receives(unit, chosen->unit);
    };
    const bool sends = me == chosen->sender && std::any_of(committed.begin(), committed.end(), takes);
    rank.sender = static_cast<std::uint8_t>(chosen->sender);
    rank.continuation = chosen->unit;
    if (planted_.record_decides ? rank.has_record != 0 : is_finished(program_.first_loop, chosen->unit)) {
      if (rank.has_record == 0) return fail(state);
      const Number own = rank.live.rank_only;
      rank.live = rank.record;
      if (planted_.model_only_record) rank.live.rank_only = own;
      run_between_loops(rank.live);
      if (planted_.record_decides) rank.continuation = std::max(chosen->unit, program_.first_loop);
    }
    return go(rank, sends || takes(committed[me]) ? At::transfer : At::restore);
  }
  bool restore(State& state, Rank& rank, std::size_t me) {
    rank.live.replicated = rank.vault.state;
    rank.unit = rank.continuation;
    if (rank.unit == 0) return end_unit(state, rank, me);
    const Slot* fits = slot_for(std::span<const Slot>(rank.box), rank.unit);
    for (const Slot& slot : rank.box)
      if (planted_.newest_slot && slot.whole != 0 && (!fits || slot.unit > fits->unit)) fits = &slot;
    if (!fits) return fail(state);
    rank.live.rank_only = fits->content;
    return end_unit(state, rank, me);
  }
  Slot& slot(Rank& rank) const { return rank.box[slot_of(rank.unit, planted_.two_slots ? 2 : 3)]; }
  static bool begin_unit(Rank& rank) {
    ++rank.unit;
    rank.next = rank.written = 0;
    return go(rank, At::launch);
  }
  bool launch(State& state, Rank& rank, std::size_t me) {
    const UnitKind& unit = program_.unit(rank.unit);
    const std::size_t all = unit.collectives.size();
    auto before = planted_.last_launch ? all - 1 : written_before(unit.collectives);
    if (planted_.late_write) before = all;
    if (rank.next == before && rank.written == 0) {
      slot(rank).content.state = torn;
      slot(rank).whole = planted_.torn_slot;
      return go(rank, At::writing);
    }
    if (rank.next == all) return complete(state, rank);
    send(rank, rank.begun + rank.next, contribution(rank.live, unit, me, rank.next));
    if (++rank.next == all && planted_.early_commit) rank.vault.unit = rank.unit;
    return true;
  }
  bool complete(State& state, Rank& rank) {
    const auto& collectives = program_.unit(rank.unit).collectives;
    Number outcome{0, 0};
    for (std::size_t i = 0; i < collectives.size(); ++i)
      for (std::size_t from = 0; from < (collectives[i] == full ? state.ranks.size() : 1); ++from) {
        const Message* sent = message(state.ranks[from], rank, rank.begun + i);
        if (!sent) return false;
        outcome.fold(sent->value);
      }
    rank.outcome = outcome;
    return go(rank, At::completed);
  }
  bool commit(State& state, Rank& rank, std::size_t me) {
    const UnitKind& unit = program_.unit(rank.unit);
    rank.live.rank_only = after(rank.live, unit);
    rank.live.replicated.fold(rank.outcome);
    hold(state, rank, rank.unit, rank.live.replicated);
    rank.begun = static_cast<std::uint16_t>(rank.begun + unit.collectives.size());
    return end_unit(state, rank, me);
  }
  void hold(State& state, Rank& rank, Unit unit, const Number& value) {
    rank.vault = {value, unit, 1, 1};
    for (const Rank& one : state.ranks)
      if (one.vault.filled != 0 && (one.vault.unit > unit + 1 || one.vault.unit + 1 < unit)) add(apart);
  }
  bool end_unit(State& state, Rank& rank, std::size_t me) {
    const Live& live = rank.live;
    Live& expected = reference_[rank.unit][me];
    if (!has_reference_) expected = live;
    if (live.rank_only.state != expected.rank_only.state) add(rank_only);
    if (live.replicated.state != expected.replicated.state) add(replicated);
    if (live.replicated.count != expected.replicated.count) add(samples);
    if (rank.unit == program_.first_loop) return go(rank, At::record);
    if (rank.unit < program_.units.size()) return begin_unit(rank);
    rank.at = planted_.leaves ? At::left : At::returned;
    if (std::all_of(state.ranks.begin(), state.ranks.end(),
                    [&](const Rank& one) { return one.generation == state.generation && one.at == rank.at; }))
      state.end = State::done;
    return true;
  }

  const Program program_;
  std::vector<std::vector<Live>> reference_;  // of each rank after each unit of the run without deaths
  bool has_reference_ = false;
  Planted planted_;
  Findings found_;
};

}  // namespace recovery_model_test
