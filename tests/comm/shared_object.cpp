// Compiled once, with -fvisibility=hidden, and linked into each of two shared objects.
#include "comm/shared_object.hpp"

#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/world/detail/control_plane.hpp"
#include "lockstep/world/detail/world_state.hpp"

using lockstep::GlooComm;

const SharedObject& functions_of_this_object() {
  static const SharedObject functions{
      [](const lockstep::World& world) -> void* { return new GlooComm{world}; },
      [](void* comm) { delete static_cast<GlooComm*>(comm); },
      [](void* comm, double value) {
        const auto tensor = at::full({1}, value, at::kDouble);
        static_cast<GlooComm*>(comm)->all_reduce(tensor).synchronize();
        return tensor.item<double>();
      },
      [](void* comm) -> std::string {
        try {
          static_cast<GlooComm*>(comm)->all_reduce(at::ones({1})).synchronize();
        } catch (const lockstep::CommunicationError& error) {
          return error.what();
        }
        return "";
      },
      [] { return lockstep::Error("").rank(); },
      [](const lockstep::World& world) -> const void* {
        return lockstep::detail::ControlPlane::of(world.rank(),
                                                  lockstep::detail::state_of(world).connection(), nullptr)
            .get();
      }};
  return functions;
}
