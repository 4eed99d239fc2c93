#pragma once

#include <algorithm>
#include <concepts>
#include <exception>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1 {

/// Values by name, as text, in an order that is equal on every rank.
using NamedValues = std::vector<std::pair<std::string, std::string>>;

namespace detail {

/// The base of errors that `ranks` ranks throw together, so that none of them needs to publish it.
struct ThrownByAll {
  int ranks;
};
template <class E>
struct CollectiveError : E, ThrownByAll {
  /// `ranks` is the size of a group, all ranks of the world by default.
  explicit CollectiveError(const std::string& text, int ranks = std::numeric_limits<int>::max())
      : E(text), ThrownByAll{ranks} {}
};

std::string first_line(const std::exception& error);
std::string first_line(const std::exception_ptr& error);

/// Runs `part`, for which the other ranks may have to wait. If `part` throws an error of this rank alone,
/// calls `tell()` inside the handler and rethrows. `ranks` is the number of ranks that may wait. A
/// CollectiveError of fewer ranks, which a sub-group has thrown together, also calls `tell()`.
template <class Part, class Tell>
decltype(auto) telling_own_error(int ranks, Part&& part, Tell&& tell) {
  try {
    return std::forward<Part>(part)();
  } catch (const CommunicationError&) {
    throw;  // the other ranks know, or cannot be reached
  } catch (const ThrownByAll& error) {
    if (error.ranks < ranks) tell();
    throw;
  } catch (...) {
    tell();
    throw;
  }
}

/// Aborts `comm` with the exception that is being handled, so that the other ranks learn of it.
template <class C>
void abort_for_others(C& comm, const std::string& where = "") {
  if (comm.size() > 1) comm.abort(where + first_line(std::current_exception()));
}

/// Returns whether every one of `ranks` of the world calls this within two seconds because each of them throws: then no
/// rank waits for another. The ranks learn this from the store, since a rank that does not throw may be in any
/// collective.
bool every_rank_throws(const World& world, const std::vector<int>& ranks) noexcept;
template <class C>
bool every_rank_throws(C& comm) noexcept {
  return every_rank_throws(comm.world(), RankNames(comm).names);
}

/// Runs `part`. If it throws on this rank but not on every rank, aborts `comm`: the other ranks may wait for
/// this rank in any collective.
template <class C, class Part>
decltype(auto) aborting(C& comm, Part&& part) {
  return telling_own_error(comm.size(), std::forward<Part>(part), [&] {
    if (comm.size() > 1 && !every_rank_throws(comm)) abort_for_others(comm);
  });
}

/// The outcome of a local computation as it is sent to other ranks: '+' and the returned bytes, or '-' and
/// the first line of the exception's text.
template <class Local>
std::string outcome_of(Local&& local) noexcept try {
  if constexpr (std::is_void_v<std::invoke_result_t<Local&>>) {
    local();
    return "+";
  } else {
    return '+' + std::string(local());
  }
} catch (...) {
  return '-' + first_line(std::current_exception());
}

/// Returns one text for all failed outcomes, equal on every rank: the text alone if every rank failed with
/// it, otherwise "rank 1: ...; rank 3: ...". An empty string if none failed.
std::string failures_text(const std::vector<std::string>& outcomes, const RankNames& name_of);

std::string encoded_values(const NamedValues& values);

/// Describes the first value that differs between two ranks, equally on every rank: "seed is 1 on ranks 0, 2
/// and 3 on rank 1". `encoded` holds each rank's values. An empty string if all are equal.
std::string first_difference(const std::vector<std::string>& encoded, const RankNames& name_of);

/// Returns every rank's bytes on rank 0, ordered by rank, and an empty list on other ranks. Collective. It
/// broadcasts the bytes of one rank at a time.
template <Communicator C>
std::vector<std::string> gather_on_rank_zero(C& comm, std::string own) {
  std::vector<std::string> all;
  for (int rank = 0; rank < comm.size(); ++rank) {
    const std::string& mine = rank == comm.rank() ? own : std::string();
    std::string bytes = rank == 0 ? mine : comm.broadcast_bytes(mine, rank);
    if (comm.rank() == 0) all.push_back(std::move(bytes));
  }
  return all;
}

/// Compares all collectives of the ranks so far. Throws MismatchError on every rank if they differ. Collective and blocking.
template <Communicator C>
void compare_calls(C& comm) {
  if (comm.size() > 1) static_cast<void>(comm.all_gather_bytes(std::string()));
}

}  // namespace detail

/// Runs `local()` on every rank and returns the results of all ranks, by rank. `local` returns bytes (any
/// length) or void, and calls no collective. If `local` throws on any rank, every rank throws the same E with
/// the texts of all ranks that threw, so no rank waits for another. Collective and blocking.
template <std::derived_from<Error> E = Error, Communicator C, class Local>
std::vector<std::string> agree(C& comm, Local&& local) {
  const detail::CallScope scope("agree");
  std::vector<std::string> outcomes = comm.all_gather_bytes(detail::outcome_of(local));
  if (std::any_of(outcomes.begin(), outcomes.end(), [](const auto& one) { return one.starts_with('-'); }))
    throw detail::CollectiveError<E>(detail::failures_text(outcomes, detail::RankNames(comm)), comm.size());
  for (std::string& outcome : outcomes) outcome.erase(0, 1);
  return outcomes;
}

/// Runs `local()`, as for `agree`, on rank 0 alone and returns its result on every rank. Compares the ranks' collectives so
/// far before: rank 0 writes no file for ranks that have made different calls.
template <std::derived_from<Error> E = Error, Communicator C, class Local>
std::string agree_with_rank_zero(C& comm, Local&& local) {
  const detail::CallScope scope("agree_with_rank_zero");
  detail::compare_calls(comm);
  std::string outcome = comm.broadcast_bytes(comm.rank() == 0 ? detail::outcome_of(local) : std::string(), 0);
  if (outcome.starts_with('-'))
    throw detail::CollectiveError<E>(detail::failures_text({outcome}, detail::RankNames(comm)), comm.size());
  outcome.erase(0, 1);
  return outcome;
}

/// Compares `values` over the ranks. If they differ, throws the same E on every rank, with a text such as
/// "`claim`: seed is 1 on rank 0 and 3 on rank 1; `remedy`". Sends a digest, and the values only if they
/// differ. Collective and blocking.
template <std::derived_from<Error> E = MismatchError, Communicator C>
void require_equal(C& comm, const NamedValues& values, std::string_view claim, std::string_view remedy) {
  if (comm.size() == 1) return;
  const detail::CallScope scope("require_equal");
  const std::string own = detail::encoded_values(values);
  const std::vector<std::string> digests = comm.all_gather_bytes(std::to_string(detail::fnv1a(own)));
  if (std::all_of(digests.begin(), digests.end(), [&](const auto& other) { return other == digests[0]; }))
    return;
  const auto difference = detail::first_difference(comm.all_gather_bytes(own), detail::RankNames(comm));
  throw detail::CollectiveError<E>(std::string(claim) + ": " + difference + "; " + std::string(remedy),
                                   comm.size());
}

/// Returns whether `here` is true on any rank. Collective and blocking.
template <Communicator C>
bool any_rank(C& comm, bool here) {
  if (comm.size() == 1) return here;
  const detail::CallScope scope("any_rank");
  const std::vector<std::string> all = comm.all_gather_bytes(here ? "1" : "");
  return std::any_of(all.begin(), all.end(), [](const std::string& there) { return !there.empty(); });
}

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/comm/detail/agreement-inl.hpp"
#endif
