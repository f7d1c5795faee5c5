//! How images are made: recipes, imports, kernels, progress and errors.

pub use sandtree_images::{
    Check, CopyFile, Error, ImportSpec, Kernel, KernelChoice, KernelKind, OwnKernel, Progress,
    Recipe, Run, RunStep, Size, Stage, TimedCheck, initramfs, is_built_in,
};
