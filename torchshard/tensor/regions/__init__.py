"""What torch's compiler has to be told of DTensors: functions that are single operators, and names that are kept."""
