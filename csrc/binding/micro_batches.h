// A call over stages, cut into micro-batches of whole sequences so that stages work at once, and what they make put
// together again.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

#include "binding/call.h"
#include "layers/batch.h"
#include "model/config.h"

namespace ftbert::binding {

// Where to cut, so that each run has about as many tokens; one empty run, for all of the call, where nothing is gained,
// or where it names rows of all its tokens, has a shared prefix or is a decoder's. For a mask or offsets on a GPU this
// waits, unless the ids are too few to be cut. What is wrong with the call is left to the stages to say.
std::vector<Run> micro_batches(const Call& call, int64_t stages);

// A call on the first stage's device as one on another's. The mask comes to the CPU: every stage then counts its ones
// without waiting for its GPU.
Call call_at(const Call& call, at::Device first, at::Device device);

// One of its micro-batches.
Call micro_batch_of(const Call& call, const Run& run);

// What one stage makes, micro-batch by micro-batch.
class StageResults {
 public:
  // wants: of the call.
  StageResults(const Stage& stage, const std::vector<Want>& wants);

  // Of the stage: what it knows of `wants`, each once, and before the last its stream.
  const std::vector<Want>& asked() const { return asked_; }
  // made: what was asked, of this micro-batch. Returns the stream, which is not kept; undefined of the last stage.
  at::Tensor add(const Run& run, std::vector<at::Tensor> made);
  // What all micro-batches make of a want of the call. Hidden states without what a later stage starts from, which is
  // the one before's last.
  at::Tensor joined(Want want) const;
  int64_t tokens() const { return tokens_; }  // of a stage before the last: of the streams so far

 private:
  const Stage stage_;
  std::vector<Want> asked_;
  std::vector<Run> runs_;
  std::map<Want, std::vector<at::Tensor>> made_;  // by micro-batch
  int64_t tokens_ = 0;
};

}  // namespace ftbert::binding
