from tests.factory import db as db
from tests.factory import session as session
