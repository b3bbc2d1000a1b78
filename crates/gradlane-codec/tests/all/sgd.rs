//! SGD fused with the mean: every variant against the oracle at every length and with every
//! combination of options; what is refused.

use std::num::NonZeroU32;

use crate::common::{assert_same, Numbers, Placed};
use gradlane_codec::{
    reduce_mean_slices, reduce_sgd, reduce_sgd_slices, Buffer, FloatDtype, InstructionSet, Mean,
    ReduceError, SgdError, SgdMemory, SgdOptions, SgdSlices, SgdStep,
};

fn mean(dtype: FloatDtype, divisor: u32) -> Mean {
    Mean::of_all(dtype, NonZeroU32::new(divisor).unwrap())
}

#[test]
fn the_first_step_equals_the_mean_and_then_the_formula() {
    // Plain descent from the separately computed mean, in f64 so that the check is not circular.
    let count = 101;
    let mut numbers = Numbers(11);
    let inputs: Vec<_> = (0..3).map(|_| numbers.plain_elements(FloatDtype::F64, count)).collect();
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let parameters = numbers.plain_elements(FloatDtype::F64, count);
    let read = |bytes: &[u8]| -> Vec<f64> {
        bytes.chunks_exact(8).map(|one| f64::from_ne_bytes(one.try_into().unwrap())).collect()
    };
    let mut gradient = vec![0; parameters.len()];
    let how = mean(FloatDtype::F64, 3);
    reduce_mean_slices(InstructionSet::SCALAR, how, &inputs, &mut gradient, None).unwrap();
    let expected: Vec<f64> = read(&parameters)
        .into_iter()
        .zip(read(&gradient))
        .map(|(parameter, gradient)| parameter - 0.1 * gradient)
        .collect();
    for instruction_set in InstructionSet::available() {
        let mut output = vec![0; parameters.len()];
        let memory = SgdSlices {
            parameters: &parameters,
            momentum_buffer: None,
            output: &mut output,
            copy_to: None,
        };
        let step = SgdStep { options: SgdOptions::with_lr(0.1), first: false };
        reduce_sgd_slices(instruction_set, how, step, &inputs, memory).unwrap();
        assert_eq!(read(&output), expected, "{instruction_set}");
    }
}

/// Every combination of the options that changes which operations are done.
fn option_combinations() -> Vec<SgdOptions> {
    let mut all = Vec::new();
    for choice in 0..32_u32 {
        let on = |bit: u32| choice & (1 << bit) != 0;
        let options = SgdOptions {
            lr: 0.07,
            momentum: if on(0) { 0.9 } else { 0.0 },
            dampening: if on(1) { 0.3 } else { 0.0 },
            weight_decay: if on(2) { 1e-3 } else { 0.0 },
            nesterov: on(3),
            maximize: on(4),
        };
        if options.validate().is_ok() {
            all.push(options);
        }
    }
    all
}

/// Compares all variants with the oracle for one shape, also with parameters updated in place.
fn check_shape(dtype: FloatDtype, length: usize, step: SgdStep, offset: usize) {
    let mut numbers = Numbers((length * 16 + offset) as u64);
    let inputs: Vec<Placed> = (0..1 + length % 4)
        .map(|index| Placed::holding(&numbers.elements(dtype, length), offset + index))
        .collect();
    let contents: Vec<&[u8]> = inputs.iter().map(Placed::as_ref).collect();
    let parameters = Placed::holding(&numbers.elements(dtype, length), offset + 3);
    let state = Placed::holding(&numbers.elements(dtype.accumulator(), length), offset + 1);
    let how = Mean { add_zero: length.is_multiple_of(3), ..mean(dtype, 1 + (length % 5) as u32) };
    let bytes = parameters.as_ref().len();
    let mut expected = None;
    for instruction_set in InstructionSet::available() {
        let what = || format!("{dtype} {instruction_set} {length} elements, +{offset}, {step:?}");
        let mut output = Placed::room(bytes, offset + 2);
        let mut second = Placed::room(bytes, offset + 5);
        let mut momentum = state.clone();
        let memory = SgdSlices {
            parameters: parameters.as_ref(),
            momentum_buffer: Some(momentum.as_mut()),
            output: output.as_mut(),
            copy_to: Some(second.as_mut()),
        };
        reduce_sgd_slices(instruction_set, how, step, &contents, memory).unwrap();
        for buffer in [&output, &second, &momentum] {
            buffer.assert_guards();
        }
        assert_eq!(output.as_ref(), second.as_ref(), "{}", what());
        if !step.options.has_momentum() {
            assert_eq!(momentum.as_ref(), state.as_ref(), "{}", what());
        }
        let (expected_output, expected_momentum) =
            expected.get_or_insert_with(|| (output.clone(), momentum.clone()));
        assert_same(dtype, output.as_ref(), expected_output.as_ref(), &what);
        let state_dtype = dtype.accumulator();
        assert_same(state_dtype, momentum.as_ref(), expected_momentum.as_ref(), &what);
    }

    let mut in_place = parameters;
    let mut momentum = state;
    let pointers: Vec<*const u8> = contents.iter().map(|one| one.as_ptr()).collect();
    let target = in_place.as_mut().as_mut_ptr();
    let memory = SgdMemory {
        parameters: target,
        momentum_buffer: Some(momentum.as_mut().as_mut_ptr()),
        output: target,
        copy_to: None,
    };
    // SAFETY: all buffers have `length` elements; the output is exactly the parameters.
    unsafe { reduce_sgd(how, step, &pointers, memory, length) }.unwrap();
    let (expected_output, _) = expected.unwrap();
    assert_same(dtype, in_place.as_ref(), expected_output.as_ref(), &|| "in place".to_owned());
}

#[test]
fn every_length_gives_the_bits_of_the_oracle() {
    let combinations = option_combinations();
    assert_eq!(combinations.len(), 20);
    for dtype in FloatDtype::ALL {
        for length in 0..=300 {
            for turn in 0..2 {
                let options = combinations[(2 * length + turn) % combinations.len()];
                let step = SgdStep { options, first: (length / 10) % 2 == turn };
                check_shape(dtype, length, step, length % 8);
            }
        }
    }
}

#[test]
fn every_combination_of_options_gives_the_bits_of_the_oracle() {
    for dtype in FloatDtype::ALL {
        for options in option_combinations() {
            for first in [false, true] {
                check_shape(dtype, 149, SgdStep { options, first }, 3);
            }
        }
    }
}

#[test]
fn options_that_torch_refuses_are_refused() {
    assert_eq!(SgdOptions::with_lr(0.0).validate(), Ok(()));
    let negative = SgdOptions::with_lr(-0.1).validate();
    assert_eq!(negative, Err(SgdError::BadOption { option: "lr", value: -0.1 }));
    let not_a_number = SgdOptions { weight_decay: f64::NAN, ..SgdOptions::with_lr(0.1) };
    assert!(not_a_number.validate().is_err());
    for (momentum, dampening) in [(0.0, 0.0), (0.9, 0.1)] {
        let options =
            SgdOptions { momentum, dampening, nesterov: true, ..SgdOptions::with_lr(0.1) };
        assert_eq!(options.validate(), Err(SgdError::Nesterov { momentum, dampening }));
    }
}

#[test]
fn missing_or_misfit_buffers_are_refused_untouched() {
    let parameters = vec![0_u8; 16];
    let mut output = vec![0x77; 16];
    let mut state = vec![0x77; 8];
    let how = mean(FloatDtype::F16, 1);
    let options = SgdOptions { momentum: 0.9, ..SgdOptions::with_lr(0.1) };
    let step = SgdStep { options, first: true };
    let memory = SgdSlices {
        parameters: &parameters,
        momentum_buffer: None,
        output: &mut output,
        copy_to: None,
    };
    let error = reduce_sgd_slices(InstructionSet::active(), how, step, &[&parameters], memory);
    assert_eq!(error, Err(SgdError::NoMomentumBuffer { momentum: 0.9 }));
    let memory = SgdSlices {
        parameters: &parameters,
        momentum_buffer: Some(&mut state),
        output: &mut output,
        copy_to: None,
    };
    let error = reduce_sgd_slices(InstructionSet::active(), how, step, &[&parameters], memory);
    let expected = ReduceError::Length { buffer: Buffer::Momentum, bytes: 8, expected_bytes: 32 };
    assert_eq!(error, Err(SgdError::Buffers(expected)));
    assert!(output.iter().chain(&state).all(|byte| *byte == 0x77));
}
