#pragma once

namespace lockstep {

class DistributedSampler;
class GlooComm;
struct Fp32;

/// The default policies of a Trainer.
using DefaultSampler = DistributedSampler;
using DefaultComm = GlooComm;
using DefaultPrecision = Fp32;

template <class... Policies>
class Trainer;

}  // namespace lockstep
