#include "everything.hpp"
#include "odr.hpp"

std::array<const void*, 2> addresses_in_b() {
  return {&lockstep::detail::process_rank, reinterpret_cast<const void*>(&lockstep::World::from_environment)};
}

// Communicators made and used here, so that whatever tables they bring are emitted in this program.
void use_everything(const lockstep::World& world) {
  lockstep::GlooComm comm{world};
  auto tensor = torch::ones({2});
  comm.all_reduce(tensor).synchronize();
}
