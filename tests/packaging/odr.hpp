#pragma once

#include <array>

#include "lockstep/world/world.hpp"

std::array<const void*, 2> addresses_in_a();
std::array<const void*, 2> addresses_in_b();
void use_everything(const lockstep::World& world);
