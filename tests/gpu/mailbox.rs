//! The mailbox, through which blocks of a launch pass values (csrc/device/mailbox.cuh): tags that repeat, and two
//! launches that use it at once.

use aril::{
    cuda::{Kernels, raw},
    plan::Capacity,
};
use half::bf16;

use crate::{chain::Stack, common::small::choose, device::Buffer};

const IN: usize = 2048;
const OUT: usize = 320;
const MOST_TOKENS: usize = 512;
const HEADER_WORDS: usize = 16;

fn stack() -> Stack {
    let capacity = Capacity::tokens(MOST_TOKENS).slots(2).rank(16);
    Stack::new(&[(IN, &[256, 64])], capacity, 2, |adapter, _| [16, 9][adapter])
}

/// A mailbox that the test writes, and launches on it.
struct Launches<'a> {
    stack: &'a Stack,
    mailbox: Buffer,
    _slots: Buffer,
    x: Buffer,
    initial_y: Vec<bf16>,
    y: Vec<Buffer>,
    batches: Vec<(usize, raw::Routing, Buffer, raw::RoutedBatch)>,
}

impl<'a> Launches<'a> {
    /// For launches with these numbers of tokens.
    fn new(stack: &'a Stack, tokens: &[usize]) -> Self {
        let gpu = &stack.gpu;
        let slots: Vec<i32> = (0..MOST_TOKENS as i32).map(|token| token % 2).collect();
        let number = |i: usize| bf16::from_f32((i * 7919 % 255) as f32 / 128.0 - 1.0);
        let x: Vec<bf16> = (0..MOST_TOKENS * IN).map(number).collect();
        let initial_y: Vec<bf16> = (0..MOST_TOKENS * OUT).map(number).collect();
        let bytes = stack.raw_layer(0).plan().workspace_bytes().mailbox;
        let (slots, x) = (gpu.upload(&slots), gpu.upload(&x));
        let batches = tokens.iter().map(|&tokens| {
            let (mut routing, memory) = stack.routing();
            let batch = stack.route(&mut routing, slots.address(), tokens);
            (tokens, routing, memory, batch)
        });
        let batches = batches.collect();
        let y = tokens.iter().map(|_| gpu.upload(&initial_y)).collect();
        let launches = Self { stack, mailbox: gpu.upload(&vec![0_u8; bytes]), _slots: slots, x, initial_y, y, batches };
        gpu.synchronize();
        launches
    }

    fn launch(&self, number: usize, mailbox: &Buffer) {
        let (tokens, _, _, batch) = &self.batches[number];
        let partials = raw::DeviceRegion { ptr: mailbox.address(), bytes: 0 };
        let workspace = raw::Workspace { mailbox: mailbox.region(), partials };
        self.stack.launch(0, [self.x.address(), self.y[number].address()], *tokens, *batch, workspace);
    }

    /// Takes the bits of every y and restores its initial values.
    fn take(&mut self) -> Vec<Vec<u16>> {
        let results = self.y.iter().map(Buffer::read::<u16>).collect();
        self.y.iter_mut().for_each(|y| y.write(&self.initial_y));
        results
    }

    /// For launches with a mailbox each.
    fn expected(&mut self) -> Vec<Vec<u16>> {
        let bytes = self.mailbox.region().bytes;
        for number in 0..self.batches.len() {
            let mailbox = self.stack.gpu.upload(&vec![0_u8; bytes]);
            self.launch(number, &mailbox);
            self.stack.gpu.synchronize();
        }
        let expected = self.take();
        assert!(expected.iter().all(|y| *y != bytemuck::cast_slice::<_, u16>(&self.initial_y)), "there are no deltas");
        expected
    }
}

/// The counter of launches wraps around, while the words of earlier launches hold the tags that are used again.
#[test]
#[ignore = "needs a GPU"]
fn tags_come_again_without_harm() {
    let stack = stack();
    for &stale_tag in choose(&[None, Some(1_u32), Some(2), Some(3)][..], &[None, Some(2)]) {
        for big in (1..6).step_by(choose(1, 3)) {
            // The tags are 2^32 - 2, 2^32 - 1, 1, 2, 3, 4. Small launches leave the words of all rows but the first as
            // they are.
            let tokens: Vec<usize> = (0..6).map(|number| if number == big { MOST_TOKENS } else { 1 }).collect();
            let mut launches = Launches::new(&stack, &tokens);
            let expected = launches.expected();
            // The state after a launch of all rows, with another epoch and other tags.
            let whole = Launches::new(&stack, &[MOST_TOKENS]);
            whole.launch(0, &whole.mailbox);
            let mut words = whole.mailbox.read::<u64>();
            words[0] = 0xffff_fffd << 32;
            let nan = u64::from(f32::NAN.to_bits());
            for pair in &mut words[HEADER_WORDS..] {
                *pair = stale_tag.map_or(0, |tag| u64::from(tag) << 32 | nan);
            }
            launches.mailbox.write(&words);
            for number in 0..tokens.len() {
                launches.launch(number, &launches.mailbox);
            }
            let got = launches.take();
            for (number, (got, expected)) in got.iter().zip(&expected).enumerate() {
                assert!(got == expected, "launch {number}, the large one {big}, behind pairs of tag {stale_tag:?}");
            }
            // No launch has the tag 0, and no launch is running.
            assert_eq!(launches.mailbox.read::<u64>()[0], 4 << 32);
        }
    }
}

/// Loading kernels tests the order in which the device starts blocks, on a separate stream. A capture on another thread
/// is not disturbed.
#[test]
#[ignore = "needs a GPU"]
fn kernels_are_loaded_beside_a_capture() {
    let stack = stack();
    let mut launches = Launches::new(&stack, &[40, 3]);
    let expected = launches.expected();
    let mailbox = stack.gpu.upload(&vec![0_u8; launches.mailbox.region().bytes]);
    stack.gpu.synchronize();
    let graph = stack.gpu.capture(|| {
        launches.launch(0, &mailbox);
        std::thread::scope(|scope| {
            let load = || Kernels::load_into(&stack.gpu.context).map(drop);
            let loads = [(); 4].map(|()| scope.spawn(load));
            loads.into_iter().for_each(|load| load.join().unwrap().unwrap());
        });
        launches.launch(1, &mailbox);
    });
    graph.replay();
    assert!(launches.take() == expected);
}

/// Misuse that would hang a launch, or corrupt another. It ends with an error that loses the device, so each case has a
/// process.
mod misuse {
    use std::{env, process::Command};

    use cudarc::driver::sys::CUresult;

    use super::*;

    const VARIABLE: &str = "ARIL_MISUSE";
    const DETECTED: i32 = 42;
    /// More than a launch has.
    const MOST_BLOCKS: u64 = 1024;

    /// What a kernel fails with: builds for development assert.
    const ERROR: CUresult = match cfg!(debug_assertions) {
        true => CUresult::CUDA_ERROR_ASSERT,
        false => CUresult::CUDA_ERROR_LAUNCH_FAILED,
    };

    /// Runs the calling test again in a new process, which launches on mailboxes that begin with these words until a
    /// launch fails, and expects a kernel's failure there, with this message in builds for development.
    fn is_detected(test: &str, headers: impl IntoIterator<Item = Vec<u64>>, message: &str) {
        if env::var_os(VARIABLE).is_some() {
            let stack = stack();
            // Tiles of so few tokens pass their sums through the mailbox.
            let mut launches = Launches::new(&stack, &[40]);
            launches.launch(0, &launches.mailbox);
            let mut words = launches.mailbox.read::<u64>();
            assert!(words[HEADER_WORDS..].iter().any(|word| word >> 32 == 1), "no sum came through the mailbox");
            let results = headers.into_iter().map(|header| {
                words.fill(0);
                words[..header.len()].copy_from_slice(&header);
                launches.mailbox.write(&words);
                launches.launch(0, &launches.mailbox);
                stack.gpu.stream.synchronize()
            });
            let result: Result<(), _> = results.collect();
            println!("{result:?}");
            // The context is lost, so nothing in it can be freed.
            std::process::exit(if result.is_err_and(|error| error.0 == ERROR) { DETECTED } else { 1 });
        }
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", test, "--include-ignored", "--nocapture"]).env(VARIABLE, "1");
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert_eq!(output.status.code(), Some(DETECTED), "{text}");
        assert!(!cfg!(debug_assertions) || text.contains(message), "{text}");
    }

    /// The state while blocks of another launch have yet to start.
    #[cfg(debug_assertions)]
    #[test]
    #[ignore = "needs a GPU, and kernels built for development"]
    fn two_launches_at_once_are_detected() {
        let of_another = [vec![5, 0, 12_345]];
        let message = "one mailbox is used by two launches at once";
        is_detected("mailbox::misuse::two_launches_at_once_are_detected", of_another, message);
    }

    /// The count of blocks carries into the tag: the first blocks of the launch get another tag than the others. How
    /// many they are is tried out, so that one of them has work, which nobody with the other tag ever finds.
    #[test]
    #[ignore = "needs a GPU"]
    fn a_wait_without_an_end_is_detected() {
        let carrying = (1..MOST_BLOCKS).map(|blocks| vec![(1 << 32) - blocks]);
        let message = "what is polled for never comes";
        is_detected("mailbox::misuse::a_wait_without_an_end_is_detected", carrying, message);
    }
}
