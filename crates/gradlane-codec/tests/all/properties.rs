//! Properties of the kernels over drawn shapes, values and options.

use std::num::NonZeroU32;

use crate::common::{assert_same, Numbers};
use gradlane_codec::{
    reduce_mean_slices, reduce_sgd_slices, FloatDtype, InstructionSet, Mean, SgdOptions, SgdSlices,
    SgdStep,
};
use proptest::prelude::*;

fn dtypes() -> impl Strategy<Value = FloatDtype> {
    prop::sample::select(FloatDtype::ALL.to_vec())
}

fn variants() -> impl Strategy<Value = InstructionSet> {
    prop::sample::select(InstructionSet::available().collect::<Vec<_>>())
}

fn means() -> impl Strategy<Value = Mean> {
    (dtypes(), 1_u32..40, any::<bool>()).prop_map(|(dtype, divisor, add_zero)| Mean {
        dtype,
        divisor: NonZeroU32::new(divisor).unwrap(),
        add_zero,
    })
}

fn options() -> impl Strategy<Value = SgdOptions> {
    (0.0..1.0_f64, 0.0..1.0_f64, 0.0..0.1_f64, any::<[bool; 5]>()).prop_map(
        |(lr, momentum, weight_decay, [keeps, decays, dampens, nesterov, maximize])| SgdOptions {
            lr,
            momentum: if keeps { momentum } else { 0.0 },
            dampening: if dampens { lr } else { 0.0 },
            weight_decay: if decays { weight_decay } else { 0.0 },
            nesterov: nesterov && keeps && !dampens,
            maximize,
        },
    )
}

fn contributions(dtype: FloatDtype, count: usize, length: usize, seed: u64) -> Vec<Vec<u8>> {
    let mut numbers = Numbers(seed);
    (0..count).map(|_| numbers.elements(dtype, length)).collect()
}

fn borrowed(inputs: &[Vec<u8>]) -> Vec<&[u8]> {
    inputs.iter().map(Vec::as_slice).collect()
}

fn reduced(instruction_set: InstructionSet, mean: Mean, inputs: &[&[u8]], bytes: usize) -> Vec<u8> {
    let mut output = vec![0x77; bytes];
    reduce_mean_slices(instruction_set, mean, inputs, &mut output, None).unwrap();
    output
}

proptest! {
    #[test]
    fn a_variant_gives_the_bits_of_the_oracle(
        mean in means(),
        instruction_set in variants(),
        count in 0_usize..=12,
        length in 0_usize..600,
        seed: u64,
    ) {
        let inputs = contributions(mean.dtype, count, length, seed);
        let inputs = borrowed(&inputs);
        let bytes = length * mean.dtype.element_bytes();
        let found = reduced(instruction_set, mean, &inputs, bytes);
        let expected = reduced(InstructionSet::SCALAR, mean, &inputs, bytes);
        assert_same(mean.dtype, &found, &expected, &|| format!("{mean:?} {instruction_set}"));
    }

    #[test]
    fn the_cut_into_slices_does_not_change_a_bit(
        mean in means(),
        instruction_set in variants(),
        count in 1_usize..=5,
        length in 1_usize..400,
        slice in 1_usize..100,
        seed: u64,
    ) {
        let inputs = contributions(mean.dtype, count, length, seed);
        let size = mean.dtype.element_bytes();
        let whole = reduced(instruction_set, mean, &borrowed(&inputs), length * size);
        let mut pieces = Vec::new();
        for start in (0..length).step_by(slice) {
            let range = start * size..length.min(start + slice) * size;
            let parts: Vec<&[u8]> = inputs.iter().map(|input| &input[range.clone()]).collect();
            pieces.extend(reduced(instruction_set, mean, &parts, range.len()));
        }
        assert_same(mean.dtype, &pieces, &whole, &|| format!("{mean:?} {instruction_set} by {slice}"));
    }

    #[test]
    fn absent_ranks_count_as_explicit_zeros(
        mean in means(),
        instruction_set in variants(),
        present in prop::collection::vec(any::<bool>(), 2..8),
        length in 0_usize..200,
        seed: u64,
    ) {
        prop_assume!(present.iter().any(|one| !one));
        let mut inputs = contributions(mean.dtype, present.len(), length, seed);
        let explicit = Mean { add_zero: false, ..mean };
        let implicit = Mean { add_zero: true, ..mean };
        for (input, present) in inputs.iter_mut().zip(&present) {
            if !present {
                input.fill(0);
            }
        }
        let bytes = length * mean.dtype.element_bytes();
        let expected = reduced(instruction_set, explicit, &borrowed(&inputs), bytes);
        let contributed: Vec<&[u8]> = borrowed(&inputs)
            .into_iter()
            .zip(&present)
            .filter_map(|(input, present)| present.then_some(input))
            .collect();
        let found = reduced(instruction_set, implicit, &contributed, bytes);
        assert_same(mean.dtype, &found, &expected, &|| format!("{mean:?} {instruction_set} {present:?}"));
    }

    #[test]
    fn sgd_gives_the_bits_of_the_oracle_over_several_steps(
        mean in means(),
        instruction_set in variants(),
        options in options(),
        count in 1_usize..=5,
        length in 0_usize..200,
        seed: u64,
    ) {
        let dtype = mean.dtype;
        let start = Numbers(seed ^ 1).plain_elements(dtype, length);
        let state_bytes = length * dtype.accumulator().element_bytes();
        let mut states = [(start.clone(), vec![0; state_bytes]), (start, vec![0; state_bytes])];
        for round in 0..3_u64 {
            let inputs = contributions(dtype, count, length, seed.wrapping_add(round));
            let inputs = borrowed(&inputs);
            let step = SgdStep { options, first: round == 0 };
            for (state, instruction_set) in states.iter_mut().zip([instruction_set, InstructionSet::SCALAR]) {
                let mut output = vec![0; state.0.len()];
                let memory = SgdSlices {
                    parameters: &state.0,
                    momentum_buffer: Some(&mut state.1),
                    output: &mut output,
                    copy_to: None,
                };
                reduce_sgd_slices(instruction_set, mean, step, &inputs, memory).unwrap();
                state.0 = output;
            }
            let [(found, found_state), (expected, expected_state)] = &states;
            let what = || format!("{mean:?} {instruction_set} {step:?}");
            assert_same(dtype, found, expected, &what);
            assert_same(dtype.accumulator(), found_state, expected_state, &what);
        }
    }
}
