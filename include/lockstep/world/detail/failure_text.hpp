#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/json.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/call_history.hpp"
#include "lockstep/world/detail/environment.hpp"

/// Every text about a failure, made from its values where it is printed or thrown. No code reads them again.
namespace lockstep::inline v0_1::detail {

/// Returns "all_reduce #57 (bucket 2) of Trainer::fit", "recv from rank 2 (tag 5)", "the rendezvous", "the
/// rendezvous of the communicator 'x'" or "the constructor of Trainer (communicator 'x')".
inline std::string text_of(const FailedCall& call) {
  if (call.operation == rendezvous) {
    if (!call.served.empty()) return served_text(call.served, call.label.empty() ? rendezvous : call.label);
    return call.label.empty() ? "the rendezvous" : "the rendezvous of the " + call.label;
  }
  std::string text = call.operation;
  if (call.peer >= 0)
    text += formatted(" {} rank {} (tag {})", text[0] == 's' ? "to" : "from", call.peer, call.tag);
  else if (call.sequence > 0)
    text += formatted(" #{}", call.sequence);
  if (!call.label.empty()) text += formatted(" ({})", call.label);
  return call.served.empty() ? text : text + " of " + served_text(call.served, call.part);
}

inline constexpr const char* equally_many = "; every rank must make the same calls, and equally many";

/// Returns "while rank 0 waits in all_reduce #8".
inline std::string waiting_text(int rank, const FailedCall& call) {
  return formatted("while rank {} waits in {}", rank, text_of(call));
}

using Elapsed = std::chrono::steady_clock::duration;

/// Formats a duration: "250 ms", "6 s".
inline std::string duration_text(Elapsed time) {
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
  return milliseconds < 1000 ? formatted("{} ms", milliseconds) : formatted("{} s", milliseconds / 1000);
}

/// Returns the failure's text of a rank whose launcher has been stopped for `time`.
inline std::string stopped_launcher_text(Elapsed time, int launcher) {
  return formatted(
      "its launcher (pid {}) has been stopped for {} (LOCKSTEP_HEARTBEAT_TIMEOUT), and holds back "
      "the output of its ranks: continue it in time (`kill -CONT {}`)",
      launcher, duration_text(time), launcher);
}

/// Returns the failure of `rank` (`process`), which has ended before any other rank would have noticed it.
inline Failure ended_unnoticed(int rank, const std::string& process) {
  return {.kind = FailureKind::died,
          .rank = rank,
          .message = formatted("has ended before its first communicator ({}): it was killed, or its "
                               "connection broke; look at its output, and start all ranks again",
                               process)};
}

/// Returns the store's name for errors: "the store at node1:29500, which rank 0 hosts,".
inline std::string store_text(const Environment& environment) {
  if (environment.store_outlives_attempts) return "the store that rank 0 hosts";
  const auto url = parse_rendezvous(environment.rendezvous);
  return formatted("the store at {}:{}{}", url.host, url.port,
                   environment.store_is_hosted ? "" : ", which rank 0 hosts,");
}

/// Returns how the errors of other ranks name a failure: "rank 3 failed first: reason", "rank 3 (pid 811 on
/// nodeA) died (SIGKILL)" where a launcher reports it, or the sentence of a rank that has left early.
inline std::string cause_text(const Failure& failure) {
  if (failure.kind == FailureKind::left_early) return failure.message;
  std::string who = failure.rank < 0 ? "another rank" : formatted("rank {}", failure.rank);
  if (!failure.host.empty()) who += formatted(" (pid {} on {})", failure.pid, failure.host);
  const bool ended = failure.kind == FailureKind::died || failure.kind == FailureKind::stopped;
  return formatted("{}{} {}", who, ended ? "" : " failed first:", failure.message);
}

/// Returns the failure of `rank`, which left a group after its collective `last` while `waiter` waits in `call`.
inline Failure left_early(int rank, const FailedCall& last, int waiter, const FailedCall& call) {
  return {.kind = FailureKind::left_early,
          .rank = rank,
          .message = formatted("rank {} has left after {} {}{}", rank,
                               last.sequence == 0 ? "no collective" : text_of(last),
                               waiting_text(waiter, call), equally_many)};
}

/// Returns the failure of `rank`, which ended with exit code `code`, -1 if that is unknown, while `waiter` waits in `call`,
/// if that is known. `seen`: what the waiter has seen, by default the exit code.
inline Failure ended_early(int rank, int waiter, const FailedCall& call, int code = 0,
                           std::string seen = {}) {
  if (seen.empty()) seen = "has ended" + (code < 0 ? "" : formatted(" with exit code {}", code));
  if (code != 0)
    return {.kind = FailureKind::died, .rank = rank, .message = seen + " " + waiting_text(waiter, call)};
  const auto where =
      call.operation.empty() ? "while other ranks still communicated with it" : waiting_text(waiter, call);
  return {.kind = FailureKind::left_early,
          .rank = rank,
          .code = 0,
          .message = formatted("rank {} has ended with exit code 0 {}{}", rank, where, equally_many)};
}

/// Returns the text about the rank that hosts the store, which cannot say why it has ended. `known` is that of its failure.
inline std::string store_ended(const std::string& known, const Environment& env, const FailedCall& call) {
  const bool rank_hosts = !env.store_is_hosted || env.store_outlives_attempts;
  return (rank_hosts ? "has ended, and the store with it," : known) + " " + waiting_text(env.rank, call);
}

/// Returns the failure of `rank`, which has been silent for `time` while other ranks wait for it in `call`.
inline Failure silent_for(Elapsed time, int rank, const FailedCall& call) {
  return {.kind = FailureKind::timed_out,
          .rank = rank,
          .message = formatted("it has not answered for {} (LOCKSTEP_HEARTBEAT_TIMEOUT), and others wait "
                               "for it in {}: it is stopped, or its host is cut off",
                               duration_text(time), text_of(call))};
}

/// Returns "the communicator 'lockstep/comm/0' in the constructor of Trainer" of its rendezvous.
inline std::string making_text(const FailedCall& call) {
  return "the " + call.label + (call.served.empty() ? "" : " in " + call.served);
}

/// Returns the text about `ranks` that have not come to the rendezvous `call` after `waited`.
inline std::string not_come(const std::string& ranks, bool one, const FailedCall& call, Elapsed waited) {
  return formatted("{} {} not come to make {} after {}", ranks, one ? "has" : "have", making_text(call),
                   duration_text(waited));
}

/// Returns the text about `call` after `waited` where the store does not answer, for the time `silent` if that is known.
inline std::string store_silent(const FailedCall& call, Elapsed waited, const Environment& env,
                                const std::string& silent) {
  return formatted(
      "{} after {}: {} does not answer, so nobody knows which rank is late. Its host is stopped or cut off "
      "from rank {}: look there, or at the network between them{}",
      call.operation == rendezvous ? making_text(call) + " is not made" : text_of(call) + " is not complete",
      duration_text(waited), store_text(env), env.rank,
      silent.empty() ? "" : ". It has been silent for " + silent + " (LOCKSTEP_HEARTBEAT_TIMEOUT)");
}

/// Returns the text about `call` after `waited`, in which rank `host` hosts the store and `ranks` have not left `group`.
inline std::string staying_text(const FailedCall& call, Elapsed waited, int host,
                                const std::vector<int>& ranks, const std::string& group) {
  return formatted(
      "{} is not complete after {}: rank {} hosts the store and waits for {} to leave the communicator '{}'",
      text_of(call), duration_text(waited), host, listed_ranks(ranks), group);
}

/// Returns the text about two ranks that are in different public calls: "rank 0 is in Trainer::evaluate, rank
/// 1 in Trainer::save_checkpoint; call both on every rank, and equally often". Empty if neither is in one, or
/// both are in the same.
inline std::string different_calls(int one, const FailedCall& here, int other, const FailedCall& there) {
  if (one > other) return different_calls(other, there, one, here);
  if (here.served.empty() && there.served.empty()) return {};
  // Where the outermost calls differ, the calls inside them explain nothing.
  const bool outer = !here.served.empty() && !there.served.empty() && here.served != there.served;
  const auto place = [&](const FailedCall& call) {
    if (call.served.empty()) return "a call of " + call.operation;
    return outer ? call.served : served_text(call.served, call.part);
  };
  return different_calls({place(here), place(there)}, {one, other});
}

/// Returns the text of the timeout error of `call`, which names the late and the silent ranks. `positions`
/// holds the last collective of each rank that answered, by global rank. `waited` is the time already waited.
/// `elsewhere` holds collectives of other communicators that a rank has entered and this rank has not.
inline std::string lateness(const FailedCall& call, const std::map<int, FailedCall>& positions,
                            const std::vector<int>& ranks, int own_rank, const std::string& waited,
                            const std::map<int, RankPosition>& elsewhere = {}) {
  const auto last = [](const FailedCall& position) {
    return position.sequence == 0 ? std::string("at the start") : "last at " + text_of(position);
  };
  const auto have = [](const std::vector<int>& some) {
    return listed_ranks(some) + (some.size() == 1 ? " has" : " have");
  };
  const std::string incomplete = formatted("{} is not complete after {}", text_of(call), waited);
  std::vector<int> late, silent;
  std::string where, other_place;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const int rank = ranks[i];
    if (rank == own_rank || (call.peer >= 0 && static_cast<int>(i) != call.peer)) continue;
    const auto found = positions.find(rank);
    if (found == positions.end()) {
      silent.push_back(rank);
      continue;
    }
    const FailedCall& there = found->second;
    if (call.peer >= 0) return formatted("{}: rank {} is {}", incomplete, rank, last(there));
    const bool other_call = there.operation != call.operation ||
                            (!call.served.empty() && !there.served.empty() && call.served != there.served);
    if (call.sequence > 0 && there.sequence == call.sequence && other_call) {
      const std::string calls = different_calls(own_rank, call, rank, there);
      return incomplete + ": " +
             (calls.empty() ? formatted("rank {} called {} instead", rank, there.operation) : calls);
    }
    if (there.sequence >= call.sequence) continue;
    late.push_back(rank);
    where += formatted("; {}{}", late.size() > 1 ? formatted("rank {} ", rank) : "", last(there));
    if (const auto other = elsewhere.find(rank); other_place.empty() && other != elsewhere.end())
      other_place = formatted(
          ". Rank {} has entered {} in the communicator '{}', and rank {} has not: every rank "
          "must make the calls of all communicators in the same order",
          rank, text_of(other->second.position), other->second.group, own_rank);
  }
  std::string text;
  if (!late.empty())
    text = formatted("{} not entered {} after {}{}", have(late), text_of(call), waited, where);
  if (!late.empty() && !call.served.empty()) text += formatted("; every rank must call {}", call.served);
  text += other_place;
  if (!silent.empty())
    text += formatted("{}{} not reported a position after {} of {}: dead, stopped or cut off",
                      text.empty() ? "" : ". ", have(silent), waited, text_of(call));
  return !text.empty()
             ? text
             : incomplete + " although every rank has entered it: the network or a rank is too slow";
}

/// Returns the failure of two ranks whose calls in a communicator differ, at the latest in collective
/// `found.sequence`. `one` and `other` are their last calls.
inline Failure mismatch(const CallDifference& found, const std::string& communicator,
                        const std::vector<RecordedCall>& one, const std::vector<RecordedCall>& other) {
  if (found.one > found.other)
    return mismatch({found.other, found.one, found.sequence}, communicator, other, one);
  Failure failure{.kind = FailureKind::mismatch, .rank = found.one, .cause = found.other};
  const auto calls = first_difference(one, other);
  if (!calls) {
    failure.message = formatted(
        "ranks {} and {} have made different calls in the communicator '{}', at the latest in collective "
        "#{}, and their last calls do not show which; every rank must make the same calls, in the same order",
        found.one, found.other, communicator, found.sequence);
    return failure;
  }
  const auto& [here, there] = *calls;
  failure.call = here.call;
  failure.message = different_calls(found.one, here.call, found.other, there.call);
  if (failure.message.empty())
    failure.message = formatted(
        "the ranks disagree on collective #{}{}: rank {} called {}, but rank {} called {}. Every rank must "
        "call the same collectives in the same order",
        here.call.sequence,
        here.call.served.empty() ? "" : " of " + served_text(here.call.served, here.call.part), found.one,
        here.content, found.other, there.content);
  return failure;
}

/// Returns the failure of two ranks that have left a communicator after different numbers of collectives, the
/// last of which are `mine` and `theirs`.
inline Failure left_unequally(int one, const FailedCall& mine, int other, const FailedCall& theirs) {
  if (one > other) return left_unequally(other, theirs, one, mine);
  const auto last = [](const FailedCall& call) {
    return call.sequence == 0 ? "no collective" : text_of(call);
  };
  return {.kind = FailureKind::mismatch,
          .rank = one,
          .cause = other,
          .call = mine.sequence > theirs.sequence ? mine : theirs,
          .message = formatted("rank {} has left after {}, and rank {} after {}{}", one, last(mine), other,
                               last(theirs), equally_many)};
}

/// Returns the failure of a run that has more than `most` communicators, which `rank` reports.
inline Failure too_many_groups(int rank, std::size_t most) {
  return {.kind = FailureKind::usage,
          .rank = rank,
          .message = formatted("the run has more than {} communicators at once, whose calls cannot be "
                               "compared: destroy those that are not used",
                               most)};
}

/// Returns the content of torchrun's error file about a failure at `when`, in seconds since 1970.
inline std::string elastic_error(const Failure& failure, std::int64_t when) {
  const auto text =
      json_string(failure.type.empty() ? failure.message : failure.type + ": " + failure.message);
  return formatted(R"({{"message":{{"message":{},"extraInfo":{{"py_callstack":{},"timestamp":"{}"}}}}}})",
                   text, text, when);
}

/// Returns the consequence, on rank `rank` in `call`, of the failure of another rank.
inline Failure consequence_of(const Failure& first, int rank, const FailedCall& call) {
  return {.kind = FailureKind::consequence,
          .rank = rank,
          .cause = first.rank,
          .cause_kind = first.kind,
          .call = call,
          .message = cause_text(first)};
}

/// Returns what rank `rank` throws in `call` once it knows the first failure of the run: a MismatchError of
/// the calls of the ranks, or a PeerError.
inline std::exception_ptr error_of(Failure first, int rank, const FailedCall& call) {
  if (first.kind != FailureKind::mismatch)
    return std::make_exception_ptr(PeerError(consequence_of(first, rank, call)));
  first.rank = rank;
  return std::make_exception_ptr(MismatchError(std::move(first)));
}

/// Returns the headline of a failure that `reporter` ("rank 3") reports. A consequence's begins with its cause.
inline std::string headline(const Failure& failure, std::string_view reporter) {
  const FailureKind kind = failure.kind;
  if (kind == FailureKind::usage || kind == FailureKind::mismatch) return failure.message;
  if (kind == FailureKind::consequence || kind == FailureKind::left_early)
    return formatted("{}; noticed by {}", failure.message, reporter);
  return formatted("{}{} {}", reporter, kind == FailureKind::died ? "" : " failed:", failure.message);
}

/// Returns the headline of a launcher: `gone` are ranks that had ended before with exit code 0.
inline std::string headline(const Failure& failure, const std::vector<int>& gone) {
  std::string text = headline(failure, formatted("rank {} (pid {})", failure.rank, failure.pid));
  if (gone.empty() || failure.kind == FailureKind::usage) return text;
  return text + (gone.size() > 1 ? "; ranks " : "; rank ") + joined(gone, ", ", ", ", 4) +
         " had ended by then, with exit code 0";
}

/// What LibTorch's and Gloo's errors mean to a communicator.
struct ForeignError {
  enum Kind { other, other_sizes } kind = other;  // other_sizes: the ranks gave tensors of different sizes
  std::string text;                               // in one line, without places in the source
};

/// Classifies the text of an error of c10d or Gloo.
inline ForeignError classify(std::string text) {
  text = text.substr(0, text.find('\n'));
  // "[enforce fail at /path/to/pair.cc:544] op.preamble.length <= op.nbytes. 60 vs 20", and a sentence behind a full stop
  constexpr std::string_view before = "op.nbytes. ";
  if (const auto found = text.find(before); found != std::string::npos) {
    const auto sizes = text.substr(found + before.size());
    return {ForeignError::other_sizes,
            formatted("the ranks gave it tensors of different sizes (a part of {} bytes)",
                      sizes.substr(0, sizes.find('.')))};
  }
  // "[/path/to/pair.cc:553] Connection closed by peer [127.0.0.1]:41234"
  if (const auto end = text.find("] ");
      text.starts_with("[") && text.substr(0, end).find(".cc:") != std::string::npos)
    text = text.substr(end + 2);
  return {ForeignError::other, text.substr(0, text.find(". This is typically"))};
}

}  // namespace lockstep::inline v0_1::detail
