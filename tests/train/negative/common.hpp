#pragma once

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/train/trainer.hpp"
#include "train/nets.hpp"

using lockstep::DistributedSampler;
using lockstep::Fp32;
using lockstep::LocalComm;
using lockstep::Trainer;
