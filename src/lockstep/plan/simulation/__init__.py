"""One step of a training that nobody runs: what a rank computes, what ranks say to each other, whom they wait for, and what failures take."""
