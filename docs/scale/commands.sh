# Every result in this folder, from the root of the repository: sh docs/scale/commands.sh [NAME...]   (all: two to three hours on two cores)
# It needs requirements-tpu.txt and no TPU. The tables: python -m experiments.compile_check.markdown docs/scale/*.json

chosen=" $* "
check() {
  name=$1; shift
  case "$chosen" in "  "|*" $name "*) python -m experiments.compile_check --json="docs/scale/$name.json" "$@" ;; esac
}

math=--flagfile=experiments/flags/math_paper
r1="--arch=r1-distill-qwen-1.5b --mesh=fsdp:-1"
check 1.5b_8k_v5e $r1 ${math}_8k.flags --topology=v5e:2x2
check 1.5b_16k_v5e $r1 ${math}_16k.flags --topology=v5e:2x2
check 1.5b_24k_v5e $r1 --anchor_memory=pinned_host ${math}_24k.flags --topology=v5e:2x2
check 1.5b_8k_v5e16 $r1 ${math}_8k.flags --topology=v5e:4x4
check 1.5b_24k_v5p $r1 ${math}_24k.flags --topology=v5p:2x2x1
check 1.5b_24k_v6e $r1 ${math}_24k.flags --topology=v6e:2x2

# Agentic search: 512 prompts of up to 2,048 tokens, five episodes each; the rest of the 4,096 + 500 tokens of an episode counts as response.
search="--arch=qwen2.5-3b --mesh=fsdp:-1 --prompts_per_step=512 --group_size=5 --mini_batches=10 --max_prompt_tokens=2048 --max_new_tokens=2548
  --kl=topk_reverse --kl_topk=32 --kl_coef=0.001 --ema_decay=0.9 --adam_b2=0.95 --micro_batch=2"
check 3b_search_v5e $search --topology=v5e:2x4
check 3b_search_v5p $search --topology=v5p:2x2x1
check 3b_search_v6e $search --topology=v6e:2x2

check 7b_8k_v5e --arch=qwen2.5-7b --mesh=fsdp:8,tensor:2 --anchor_memory=pinned_host ${math}_8k.flags --topology=v5e:4x4
check 7b_8k_v5p --arch=qwen2.5-7b --mesh=fsdp:-1 ${math}_8k.flags --topology=v5p:2x2x1
check 7b_8k_v6e --arch=qwen2.5-7b --mesh=fsdp:-1 ${math}_8k.flags --topology=v6e:2x4
check 14b_8k_v5e --arch=qwen2.5-14b --mesh=fsdp:32,tensor:2 ${math}_8k.flags --topology=v5e:8x8
check 14b_8k_v5p --arch=qwen2.5-14b --mesh=fsdp:-1 --anchor_memory=pinned_host ${math}_8k.flags --topology=v5p:2x2x1
check 14b_8k_v6e --arch=qwen2.5-14b --mesh=fsdp:8,tensor:2 ${math}_8k.flags --topology=v6e:4x4
check 32b_8k_v5e --arch=qwen2.5-32b --mesh=fsdp:16,tensor:8 --anchor_memory=pinned_host ${math}_8k.flags --topology=v5e:8x16
check 32b_8k_v5p --arch=qwen2.5-32b --mesh=fsdp:4,tensor:2 --anchor_memory=pinned_host ${math}_8k.flags --topology=v5p:2x2x2
check 32b_8k_v6e --arch=qwen2.5-32b --mesh=fsdp:4,tensor:8 --anchor_memory=pinned_host ${math}_8k.flags --topology=v6e:4x8

# Weak scaling: chips and sequences grow together; each group of eight holds the state, or all chips do.
train="--programs=anchor_pass,train_step"
weak() {
  check weak_$1 --arch=r1-distill-qwen-1.5b --mesh=data:-1,fsdp:8 ${math}_8k.flags --topology=v5e:$2 --prompts_per_step=$3 $train
  check weak_fsdp_$1 --arch=r1-distill-qwen-1.5b --mesh=fsdp:-1 ${math}_8k.flags --topology=v5e:$2 --prompts_per_step=$3 $train
}
weak 16 4x4 128
weak 64 8x8 512
weak 256 16x16 2048
