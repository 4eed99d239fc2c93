#pragma once

#include <exception>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/nccl/device.hpp"
#include "lockstep/comm/nccl/membership.hpp"
#include "lockstep/comm/nccl/words.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// What a rank says of its device when the ranks meet: which it is, and with which NCCL.
template <NcclDevice D>
std::string card_text(const D& device) {
  return fmt::format("{} {}", device.card(), device.version());
}

/// What a rank says that has none, and why.
inline std::string no_card(const std::string& reason) {
  return "!" + reason;
}

/// Looks at what all have said, by rank in the group: a rank without a GPU, two ranks on one, or ranks
/// with different NCCLs would wait for each other without a word. `ranks` are the global ones. The same error
/// on every rank.
inline void check_cards(const std::vector<std::string>& cards, const std::vector<int>& ranks, bool may_share,
                        int own_rank) {
  std::map<std::string, int> owners;
  const auto version_of = [](const std::string& card) { return std::stoi(card.substr(card.find(' ') + 1)); };
  for (const std::string& card : cards)
    if (card.starts_with("!")) throw UsageError(card.substr(1), own_rank);
  for (std::size_t i = 0; i < cards.size(); ++i) {
    if (version_of(cards[i]) != version_of(cards[0]))
      throw MismatchError(
          fmt::format("rank {} has NCCL {} and rank {} has NCCL {}: run all ranks with one LibTorch and NCCL",
                      ranks[0], version_text(version_of(cards[0])), ranks[i],
                      version_text(version_of(cards[i]))),
          own_rank);
    const std::string card = cards[i].substr(0, cards[i].find(' '));
    const auto [owner, alone] = owners.emplace(card, ranks[i]);
    if (!alone && !may_share)
      throw UsageError(
          fmt::format("ranks {} and {} are on one GPU ({}): start one rank a GPU, and give each its "
                      "own LOCAL_RANK or CUDA_VISIBLE_DEVICES",
                      owner->second, ranks[i], card),
          own_rank);
  }
}

/// Opens the device of this rank. Every rank learns what each has to say of its own, and throws the same
/// where that cannot do.
template <NcclDevice D>
D open_together(Membership& membership, int index) {
  const World& world = membership.world();
  std::optional<D> device;
  std::string card;
  try {
    device.emplace(D::open(world, index));
    card = card_text(*device);
  } catch (const std::exception& error) {
    card = no_card(first_line_of(error));
  }
  check_cards(membership.meet(card), membership.ranks(), device && device->shares_devices(), world.rank());
  return *device;
}

}  // namespace lockstep::detail
