#pragma once

#include <array>
#include <cstddef>

#include "lockstep/world/world.hpp"

std::array<const void*, 2> addresses_in_a();
std::array<const void*, 2> addresses_in_b();
std::size_t file_source_size_in_b();
void use_everything(const lockstep::World& world);
