"""What a trained model can be asked for, one operation a class; `launch.predict.Predictor` runs them."""
