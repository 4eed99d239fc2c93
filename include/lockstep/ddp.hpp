#pragma once

#include "lockstep/detail/libtorch_required.hpp"

// The headers of a hand-written training loop: launch, communicators, DistributedDataParallel, samplers and the loader.
#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/launch.hpp"
#include "lockstep/world/world.hpp"
