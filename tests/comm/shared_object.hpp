#pragma once

#include <string>

namespace lockstep {
class World;
}

/// What a shared object of the tests does with lockstep, whose headers it has compiled for itself with hidden
/// visibility.
struct SharedObject {
  void* (*make_comm)(const lockstep::World& world);
  void (*destroy_comm)(void* comm);
  /// The sum of `value` over the ranks.
  double (*sum)(void* comm, double value);
  /// What such a sum throws; empty where it throws nothing.
  std::string (*error_of_sum)(void* comm);
  /// The rank that an error of this object names.
  int (*rank_of_error)();
  /// The address of a thing of which a process has one while a communicator lives.
  const void* (*control_plane)(const lockstep::World& world);
};

/// Of the object that this is linked into.
const SharedObject& functions_of_this_object();

// Two objects.
extern "C" const SharedObject* shared_object_a();
extern "C" const SharedObject* shared_object_b();
