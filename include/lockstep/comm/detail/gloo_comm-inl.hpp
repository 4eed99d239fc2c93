#pragma once

#include <memory>
#include <utility>

#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/gloo_devices.hpp"
#include "lockstep/comm/detail/process_group_comm-inl.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/served_call.hpp"

namespace lockstep::detail {

/// Returns the options of a group whose backends are ProcessGroupGloos.
inline ProcessGroupOptions gloo_backend(const World& world, const GlooOptions& gloo) {
  ProcessGroupOptions options;
  options.timeout = gloo.timeout;
  options.check_shapes = gloo.check_shapes;
  options.make_backend = [world, gloo](const StorePtr& store, int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(connect_gloo(store, rank, size, world, gloo));
  };
  return options;
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE GlooComm::GlooComm(const World& world, GlooOptions options)
    : GlooComm([&] {
        const detail::CallScope scope("the constructor of GlooComm");
        return std::make_shared<detail::BackendGroup>(
            world, detail::all_ranks(world.size()),
            detail::Membership::next_name(world, "comm", detail::checked(options).timeout),
            detail::gloo_backend(world, detail::checked(options)));
      }()) {}

LOCKSTEP_INLINE GlooComm::GlooComm(std::shared_ptr<detail::BackendGroup> group)
    : ProcessGroupComm(std::move(group)) {}

LOCKSTEP_INLINE std::optional<GlooComm> GlooComm::new_group(const std::vector<int>& ranks) {
  if (auto group = split_group(ranks)) return GlooComm(std::move(group));
  return std::nullopt;
}

}  // namespace lockstep
