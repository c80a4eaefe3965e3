//! A stand-in for NVIDIA's CUDA driver and NCCL on host memory, for tests without a GPU.
