"""The coordinator: REST for people, gRPC for the fleet; owns every queue and every decision, all of it in Redis."""
