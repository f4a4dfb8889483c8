#include "binding/decoder_engine.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include "binding/call_words.h"
#include "binding/decode_steps.h"
#include "binding/padding.h"
#include "binding/process_group.h"
#include "binding/ranks.h"
#include "decoder.h"

namespace ftbert::binding {
namespace {

// Pinned, so that the copy does not wait for the GPU.
at::Tensor to_device(const at::Tensor& t, at::Device device) {
  return device.is_cpu() ? t : t.pin_memory().to(device, /*non_blocking=*/true);
}

template <class Device, class T>
Linear<T> linear_of(const DecoderHead& head, int64_t hidden, at::Device device) {
  if (!head.weight.defined()) return {};
  Matrix weight{.dtype = head.dtype, .n = head.vocab, .k = hidden};
  if (head.dtype == DType::q8_0) weight.per = granularity_of(head.dtype);
  if (device.is_cpu())
    weight.packed = &head.weight;
  else
    weight.data = data<void>(head.weight);
  return {.weight = weight, .bias = data<T>(head.bias), .input = {}};
}

template <class Device, class T>
class DecoderEngineOf : public DecoderEngine {
 public:
  DecoderEngineOf(const EncoderClass& encoder, const DecoderHead& head, CacheMemory& memory)
      : encoder_(encoder),
        memory_(memory),
        decoder_(CallContext<Device>(encoder.device()).context, encoder_of<Device, T>(encoder.engine()),
                 linear_of<Device, T>(head, encoder.config().hidden, encoder.device()), memory.cache),
        steps_(decoder_, encoder.config(), memory, encoder.device()) {}

  at::Tensor forward(const DecoderCall& call) override {
    const at::Device device = encoder_.device();
    CallContext<Device> on(device);
    const std::shared_ptr<Communicator<Device>> communicator = encoder_.engine().communicator().of<Device>();
    on.context.communicator = communicator.get();
    const std::unique_lock<std::mutex> alone = communicator ? communicator->alone() : std::unique_lock<std::mutex>();
    const std::shared_ptr<const ProcessGroup> processes = encoder_.engine().communicator().processes;
    return alike(
        processes.get(), [&] { return lines_of(call, processes->contents()); },
        [&] { return run_call(on, call, communicator.get()); });
  }

  int64_t recorded() const override { return steps_.recorded(); }

 private:
  at::Tensor run_call(CallContext<Device>& on, const DecoderCall& call, Communicator<Device>* communicator) {
    const at::Device device = encoder_.device();
    if (!encoder_.engine().uses_cuda_graphs())
      steps_.clear();
    else if (call.is_step())
      if (at::Tensor made = steps_.run(on.context, call); made.defined()) return made;
    Context<Device>& context = on.for_products();
    const at::Tensor cu = to_device(call.cu_seqlens, device), slots = to_device(call.slots, device);
    CheckedInput input =
        check_packed<Device>(context, device, encoder_.config(), call.input_ids, cu, call.max_q, std::nullopt);
    const EncoderConfig& c = encoder_.config();
    if (call.hidden.defined()) go_on_from(input, call.hidden, c.hidden, kDType<T>);
    Batch batch = input.batch;
    batch.sequences.max_k = call.max_k;
    batch.rows = {call.all_rows || !c.stage.last() ? RowKind::all : RowKind::last};
    on.for_products(decoder_.weight_scratch_bytes(context, batch.tokens(), batch.output_rows()));
    const auto plan = decoder_.plan(context, batch);
    const at::TensorOptions there = at::TensorOptions().device(device);
    const at::Tensor workspace = at::empty({static_cast<int64_t>(plan.bytes)}, there.dtype(at::kByte));
    const at::Tensor made =
        at::empty({rows_with_slack<Device>(batch.output_rows()), decoder_.cols()}, there.dtype(encoder_.dtype()));
    const CacheSlots in{data<int32_t>(slots), data<int32_t>(memory_.lengths), memory_.cache.positions()};
    if (communicator) {
      communicator->reserve(sum_bytes<Device, T>(encoder_.config(), batch));
      communicator->agree(true);
    }
    decoder_.forward(context, batch, in, plan, Workspace(workspace.data_ptr(), plan.bytes), data<T>(made));
    if (communicator) communicator->agree(true);
    return made.narrow(0, 0, batch.output_rows());
  }

  const EncoderClass& encoder_;
  CacheMemory& memory_;
  const Decoder<Device, T> decoder_;
  DecodeSteps<Device, T> steps_;
};

}  // namespace

CacheMemory::CacheMemory(KvCache layout, at::Device device) : cache(std::move(layout)), order(device) {
  const c10::DeviceGuard guard(device);
  const c10::InferenceMode normal(false);  // lengths change in place, in whatever mode the calls come
  const StreamOrder::Turn turn(order);
  const at::TensorOptions there = at::TensorOptions().device(device);
  // What lies behind a slot's tokens is read by no kernel, or replaced before it is used.
  bytes = at::empty({static_cast<int64_t>(cache.bytes())}, there.dtype(at::kByte));
  lengths = at::zeros({cache.slots()}, there.dtype(at::kInt));
  cache.lie_at(bytes.data_ptr());
  order.keep(bytes);
  order.keep(lengths);
}

std::unique_ptr<DecoderEngine> make_decoder_engine(const EncoderClass& encoder, const DecoderHead& head,
                                                   CacheMemory& memory) {
  const c10::DeviceGuard guard(encoder.device());
  std::unique_ptr<DecoderEngine> made;
  dispatch(device_kind(encoder.device()), dtype_of(encoder.dtype()), [&]<class Device, class T>(Backend<Device, T>) {
    made = std::make_unique<DecoderEngineOf<Device, T>>(encoder, head, memory);
  });
  return made;
}

}  // namespace ftbert::binding
