//! NVIDIA's collectives between processes: NCCL and the CUDA driver, loaded at run time, with deadlines.
